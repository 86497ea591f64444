"""Proof of delivery: trajectories are scored again under the weights of the versions that they are stamped with.

Consumes the batch of a step before it is trained on; changes nothing. A server that serves other weights than it says, at
another temperature or over another text, shows in the difference of log-probabilities, and the run ends. The message says
the difference, and the cause if it is a missing update or a wrong version.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from tandem.algorithms.gap import Evidence, gap
from tandem.api.batch import per_token, select, sequence_index, sum_by_sequence
from tandem.api.failures import DeliveryDisproved
from tandem.config.delivery import VerifyConfig
from tandem.proof.scoring import Scorer, Verified
from tandem.roles.samples import trained_tokens

log = logging.getLogger(__name__)

FIRST_STEPS = (1, 3)
"""Verified beside every so many. At step 1 nothing was delivered yet, so it shows whether the engines agree at all; step 3
is the first that tells one version too few from none at all."""

TOLERANCES = {torch.float32: 0.001, torch.bfloat16: 0.1}
"""Largest mean gap in nats. Agreeing engines were seen at 1e-5 in float32 and at 0.04 in bfloat16."""

GROUP_FACTOR = 2.0
"""One group, which one server makes, may be so much further off."""

MIN_TOKENS = 16
"""Fewer tokens of a group are not judged by themselves: single improbable ones decide."""

SIGMAS = 5.0
"""An update counts as arrived, or as missing, if the evidence says so by this many standard errors."""

CONFIRMATIONS = 2
"""Verifications that must call an update missing before the run ends, if the gap is within the tolerance."""

POOL = 8
"""Verifications without a result whose evidence is added up: in bfloat16 one is often too few to see a small update."""

SURVIVING = 0.5
"""The share of an adapter below which rounding makes sampling lag behind training, so that the user is told."""


class Schedule:
    """The steps whose batch is verified, and the versions that must be kept for that.

    While an update is suspected to be missing, every step is verified and every version is kept.
    """

    def __init__(self, config: VerifyConfig, eta: int):
        """``eta``: `max_head_offpolicyness`, the age that a verified token may have."""
        self._every_steps, self._ages = config.every_steps, range(1, max(1, eta) + 1)
        self.suspicious = False

    def is_due(self, step: int) -> bool:
        """True if the batch of this step is verified."""
        every = self._every_steps
        return every is not None and (self.suspicious or step in FIRST_STEPS or step % every == 0)

    def wants(self, number: int) -> bool:
        """True if a verified batch may hold tokens of this version, or of the one after it, once it is not the newest."""
        return any(self.is_due(number + 1 + age) for age in self._ages)


class Verifier:
    """Verifies a batch where one is due. Every rank makes one; what it does is collective."""

    def __init__(
        self,
        scorer: Scorer,
        config: VerifyConfig,
        dtype: torch.dtype,
        *,
        schedule: Schedule | None = None,
        confirmations: int = CONFIRMATIONS,
        keeps_kv: bool = False,
        hot_first_token: bool = False,
        seed: int = 0,
    ):
        """``dtype``: the coarser one of generation and training. ``schedule``: shared with the archive of versions.
        ``confirmations``: verifications that must agree that an update is missing. ``keeps_kv``: tokens after an update
        stand on keys and values of before, so they are not verified. ``hot_first_token``: nor is the first token of a reply,
        drawn at another temperature."""
        self._scorer, self._config, self._dtype = scorer, config, dtype
        self._keeps_kv, self._hot_first_token, self._seed = keeps_kv, hot_first_token, seed
        self._warned = False
        self._version: Callable[[], int] = lambda: 0
        self._schedule, self._confirmations, self._missed = schedule or Schedule(config, eta=1), confirmations, 0
        self._pool: deque[Evidence] = deque(maxlen=POOL)
        self._undecided = 0
        self.tolerance = config.tolerance or TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])

    def follow(self, version: Callable[[], int]) -> None:
        """``version``: the number of updates that were published so far."""
        self._version = version

    def verify_if_due(self, batch: TensorDict) -> dict[str, float]:
        """``gap/*`` of the batch of this step; where no verification is due only what rounding leaves of an adapter.

        Raises:
            DeliveryDisproved: other weights, temperature or tokens than are stamped; names a missing update or the
                version that made them, where one fits.
        """
        rounded, version = self._rounded(), self._version()
        return rounded | (self.verify(batch, version) if self._schedule.is_due(version + 1) else {})

    def state_dict(self) -> dict[str, Any]:
        """The evidence that has not decided yet, and the suspicion; the versions to compare with are the publisher's."""
        pool = [{"residual": e.residual, "step": e.step, "sequence": e.sequence} for e in self._pool]
        return {"pool": pool, "undecided": self._undecided, "missed": self._missed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the evidence."""
        self._pool = deque((Evidence(**{k: v.clone() for k, v in part.items()}) for part in state["pool"]), maxlen=POOL)
        self._undecided, self._missed = int(state["undecided"]), int(state["missed"])
        self._schedule.suspicious = self._missed > 0

    def _rounded(self) -> dict[str, float]:
        """The share of an adapter that is left in the rounded weights that are served; warns once if that is little."""
        share = self._scorer.surviving()
        if share is None:
            return {}
        if share < SURVIVING and not self._warned:
            self._warned = True
            log.warning(
                "only %.0f %% of the adapter is left in the bfloat16 weights that are served: its entries are smaller "
                "than what rounding takes, so sampling lags behind training. Set rollout.dtype=float32, or a larger "
                "actor.optimizer.lr or actor.lora.alpha (docs/lora.md); said once, gap/adapter_surviving goes on",
                100 * share,
            )
        return {"gap/adapter_surviving": share}

    def verify(self, batch: TensorDict, version: int) -> dict[str, float]:
        """Verifies as `verify_if_due` does, always. ``version``: of the weights that train now."""
        chosen = choose(batch, self._config.trajectories, self._seed + version)
        verified = self.score(select(batch, chosen), version)
        total, count = int(trained_tokens(batch).sum()), int(verified.known.sum())
        share = {"gap/verified": count / max(1, total), "gap/unknown": verified.unknown_share}
        share["memory/kept_versions_gib"] = self._scorer.kept_gib
        if not count:
            log.warning("no token of the batch could be verified: the versions that made them are not kept")
            return share
        rollout = verified.batch["rollout_logprobs"]
        off = gap(verified.stamped, rollout, verified.known)
        metrics = {
            "gap/numeric": float(off.sum()) / count,
            "gap/stale": float(gap(verified.newest, verified.stamped, verified.known).sum()) / count,
        }
        if self._is_off(verified, off):
            cause = likely_cause(verified, version, self.tolerance, self._scorer)
            raise DeliveryDisproved(self._describe(verified, off, cause, within=False))
        return share | metrics | self._weigh(verified, off, version)

    def _weigh(self, verified: Verified, off: torch.Tensor, version: int) -> dict[str, float]:
        """Adds the evidence that the last update arrived to that of before, and acts on what it says together.

        Raises:
            DeliveryDisproved: as many verifications as must agree call the update missing.
        """
        both = verified.known & ~verified.older.isnan()
        if int(both.sum()) < MIN_TOKENS:
            return {}
        rollout, sequences = verified.batch["rollout_logprobs"], sequence_index(verified.batch)
        self._pool.append(Evidence.of(rollout[both], verified.compared[both], verified.older[both], sequences[both]))
        together = Evidence.pooled(list(self._pool))
        metrics = {"gap/update_sigmas": together.sigmas}
        if abs(together.sigmas) < SIGMAS:
            self._tire(version)
            return metrics | {"gap/undecided": 1.0}
        self._pool.clear()
        self._undecided = 0
        metrics["gap/undecided"] = 0.0
        if verified.exact:
            metrics["gap/missing_update"] = together.missing_share
        self._missed = self._missed + 1 if together.sigmas < 0 else 0
        self._schedule.suspicious = self._missed > 0
        if self._missed >= self._confirmations:
            cause = missing_update(-together.sigmas, together.missing_share if verified.exact else None)
            raise DeliveryDisproved(self._describe(verified, off, cause, within=True))
        if self._missed:
            log.warning(
                "the engine seems to lack the last update before version %d, or a part of it (%.1f standard errors); every "
                "step is verified from now on, and the run ends if the next result says the same (docs/weights.md)",
                version,
                -together.sigmas,
            )
        return metrics

    def _tire(self, version: int) -> None:
        """Gives up a suspicion after `POOL` more verifications without a result, for each costs time and memory."""
        self._undecided += 1
        if self._missed and self._undecided >= POOL:
            self._missed, self._undecided, self._schedule.suspicious = 0, 0, False
            log.warning(
                "%d more verifications did not show whether the engine had the last update before version %d, so not every "
                "step is verified any longer; raise rollout.verify.trajectories for more evidence",
                POOL,
                version,
            )

    def score(self, part: TensorDict, version: int) -> Verified:
        """Scores a part of a batch under every version that its tokens, or those of the version before, need."""
        mask, stamps, numbers = self._mask(part), part["versions"], {*self._scorer.kept(), version}
        named = {int(number) for number in stamps[mask].unique()}
        before = {number - 1 for number in named} & numbers
        scores = {number: self._score(part, number, version) for number in sorted(named & numbers | {version})}
        stamped = _by_stamp(stamps, scores, age=0)
        exact = self._scores_in_float32(part, sorted(named & numbers | before), version) if before else None
        compared = exact or scores | {
            number: self._score(part, number, version) for number in sorted(before - scores.keys())
        }
        known = mask & ~stamped.isnan()
        trained = int(trained_tokens(part).sum())
        return Verified(
            part,
            known,
            stamped.nan_to_num(0.0),
            newest=scores[version],
            compared=_by_stamp(stamps, compared, age=0).nan_to_num(0.0),
            older=_by_stamp(stamps, compared, age=1),
            exact=exact is not None or self._dtype == torch.float32,
            unknown_share=1 - int(known.sum()) / trained if trained else 1.0,
        )

    def _score(self, part: TensorDict, number: int, newest: int) -> torch.Tensor:
        return self._scorer.score(part, None if number == newest else number)

    def _scores_in_float32(self, part: TensorDict, numbers: list[int], newest: int) -> dict[int, torch.Tensor] | None:
        """Scores without rounding noise; None if `_score` gives the same, or the engine cannot compute them."""
        scores: dict[int, torch.Tensor] = {}
        for number in numbers if self._dtype != torch.float32 else ():
            scored = self._scorer.score_in_float32(part, None if number == newest else number)
            if scored is None:
                return None
            scores[number] = scored
        return scores or None

    def _mask(self, part: TensorDict) -> torch.Tensor:
        """The trained tokens that one version made from beginning to end, at the trajectory's temperature. ``[T]`` bool."""
        mask = trained_tokens(part)
        if self._hot_first_token:
            before = torch.cat([mask.new_zeros(1), part["loss_mask"][:-1]])
            mask = mask & before
        if self._keeps_kv:
            sequence, large = sequence_index(part), part["versions"].max() + 1
            first = torch.full_like(part["cu_seqlens"][:-1], int(large))
            stamps = torch.where(trained_tokens(part), part["versions"], large)
            first = first.scatter_reduce(0, sequence, stamps, "amin")
            mask = mask & (part["versions"] == per_token(part, first))
        return mask

    def _is_off(self, verified: Verified, off: torch.Tensor) -> bool:
        counts = sum_by_sequence(verified.batch, verified.known.float())
        sums = sum_by_sequence(verified.batch, off)
        if float(sums.sum()) > self.tolerance * float(counts.sum()):
            return True
        groups = verified.batch["group_id"]
        for group in groups.unique():
            mine = groups == group
            if counts[mine].sum() >= MIN_TOKENS and sums[mine].sum() > GROUP_FACTOR * self.tolerance * counts[mine].sum():
                return True
        return False

    def _describe(self, verified: Verified, off: torch.Tensor, cause: str, *, within: bool) -> str:
        """The message. ``within``: the gap is within the tolerance, and only its direction is wrong."""
        dtype = str(self._dtype).removeprefix("torch.")
        stamps, count = verified.batch["versions"][verified.known], int(verified.known.sum())
        named = str(int(stamps.min())) + (f" to {int(stamps.max())}" if stamps.min() < stamps.max() else "")
        if within:
            return (
                f"the trajectories of version {named} were not made as they say. The mean difference to their scores under "
                f"the weights of their versions, {float(off.sum()) / count:.4g} nats over {count} tokens, is within the "
                f"tolerance ({self.tolerance:g} in {dtype}), but its direction shows an older version. Likely cause: {cause}"
            )
        return (
            f"the trajectories of version {named} were not made as they say: scored again under the weights of their "
            f"versions, their log-probabilities differ by {float(off.sum()) / count:.4g} nats on average over {count} "
            f"tokens (tolerance {self.tolerance:g} in {dtype}). Likely cause: {cause}"
        )


def _by_stamp(stamps: torch.Tensor, scores: dict[int, torch.Tensor], *, age: int) -> torch.Tensor:
    """The score of each token ``[T]`` under the version ``age`` before the one that it is stamped with; NaN without it."""
    scored_by_stamp = torch.full(stamps.shape, torch.nan)
    for number, scored in scores.items():
        scored_by_stamp = torch.where(stamps == number + age, scored, scored_by_stamp)
    return scored_by_stamp


def choose(batch: TensorDict, count: int, seed: int) -> torch.Tensor:
    """Picks at most ``count`` trajectories with trained tokens, from as many groups as possible; returns their indices."""
    trained = sum_by_sequence(batch, trained_tokens(batch).float()) > 0
    candidates = trained.nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    shuffled = candidates[torch.randperm(len(candidates), generator=generator)].tolist()
    seen: Counter[int] = Counter()
    ranked = []
    for place, index in enumerate(shuffled):
        group = int(batch["group_id"][index])
        ranked.append((seen[group], place, index))
        seen[group] += 1
    return torch.tensor(sorted(index for _, _, index in sorted(ranked)[:count]), dtype=torch.int64)


WHOLE = 0.75
"""Share from which on an update counts as missing as a whole."""


def missing_update(sigmas: float, share: float | None) -> str:
    """Names the cause of a gap that shows only by its direction. ``sigmas``: its size in standard errors. ``share``: the
    missing part of the update; None if rounding hides its size."""
    much = "all or most" if share is None else "all" if share > WHOLE else "a part"
    regression = "" if share is None else f"{share:.0%} by regression, "
    return (
        f"{much} of the last update before their version is missing ({regression}{sigmas:.0f} standard errors), which is "
        "too small to see token by token: they are stamped one version too new, or the server did not apply it. Restart the "
        "server, and look in its log for the update"
    )


def likely_cause(verified: Verified, version: int, tolerance: float, scorer: Scorer) -> str:
    """Names the cause of a gap above the tolerance, and the remedy. ``version``: number of the weights that are trained now.
    Collective."""
    wrong, count = _affected(verified, tolerance)
    where, known = "", verified.known
    if 0 < len(wrong) < count:
        where = f"only {len(wrong)} of {count} prompts are affected, as when one of several servers is wrong: "
        known = known & torch.isin(verified.batch["group_id"], torch.tensor(wrong))[sequence_index(verified.batch)]
    return where + (
        _wrong_version(verified, known, version, tolerance, scorer)
        or "unknown, for no version that is kept fits. Restart the server, see that it flushes its prefix cache with each "
        "update, and compare its model folder, tokenizer and temperature with the trainer's"
    )


def _off(verified: Verified, scored: torch.Tensor, known: torch.Tensor) -> float:
    """Mean difference between ``scored`` and the engine's log-probabilities over the ``known`` tokens, all ``[T]``."""
    rollout = verified.batch["rollout_logprobs"]
    return float(gap(scored.nan_to_num(0.0), rollout, known).sum()) / max(1, int(known.sum()))


def _affected(verified: Verified, tolerance: float) -> tuple[list[int], int]:
    """The groups whose gap is above the tolerance, and the number of groups with known tokens."""
    groups = verified.batch["group_id"][sequence_index(verified.batch)]
    named = groups[verified.known].unique().tolist()
    return [g for g in named if _off(verified, verified.stamped, verified.known & (groups == g)) > tolerance], len(named)


def _wrong_version(verified: Verified, known: torch.Tensor, version: int, tolerance: float, scorer: Scorer) -> str:
    """Looks for one version that made all tokens, or for stamps that are one version too new; empty if neither fits."""
    stamps = verified.batch["versions"][known]
    newest, oldest = int(stamps.max()), int(stamps.min())
    tried = {number: number for number in scorer.kept()} | {version: None}
    if newest == oldest:
        tried.pop(newest, None)
    offs = {number: _off(verified, scorer.score(verified.batch, name), known) for number, name in tried.items()}
    limit = min(tolerance, _off(verified, verified.stamped, known) / 2)
    fitting = min(offs, key=lambda number: offs[number], default=None)
    fitting = fitting if fitting is not None and offs[fitting] <= limit else None
    behind = not bool(verified.older[known].isnan().any()) and _off(verified, verified.older, known) <= limit
    if fitting is not None and fitting > oldest:
        return (
            f"they are from version {fitting}, newer than they say: the server switched before it stamped. It must stamp "
            "each token with the weights that made it"
        )
    if fitting is not None and (not behind or newest - fitting > 1 or fitting == 0):
        late = " (or they are stamped one version too new)" if behind and newest == 1 else ""
        return (
            f"all of them are from version {fitting}: no update after it was ever applied, though the server said so{late}. "
            "Restart the server, and look in its log for the update"
        )
    if behind:
        said = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
        return (
            f"they are stamped one version too new: those that say {said} are from the version before, or the last update "
            "came after its stamp. The stamp must come from the server that computes, not from the client"
        )
    return ""
