"""Proof of delivery: trajectories are scored again under the weights of the versions that they are stamped with.

A step's batch is read before it is trained on, and not changed. If a server used other weights than it reported, another
temperature or another text, the log-probabilities differ, and the run ends. The message states the difference, and the cause
if it is a missing update or a wrong version.

Batches are scored under the newest version of the weights and under the archived ones.
"""

import contextlib
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from tandem.algorithms.correction import Evidence, gap
from tandem.api.batch import per_token, select, sequence_index, sum_by_sequence, trained_tokens
from tandem.api.engines import TrainEngine
from tandem.api.failures import DeliveryDisproved
from tandem.api.team import Team
from tandem.api.weights import FolderSource, stored_entries
from tandem.config.rollout import VerifyConfig
from tandem.weights.publisher import VersionArchive


def beginning(folder: Path, engine: TrainEngine) -> FolderSource | None:
    """Returns the weights with which a run begins: those in its model folder. None if a tensor of the engine has no
    tensor of the same name in the folder. Collective."""
    names = {name for name, _ in engine.weights()}
    return FolderSource(folder) if names <= stored_entries(folder).keys() else None


def _is_of_adapter(name: str) -> bool:
    return ".lora_" in name


@dataclass(frozen=True)
class Verified:
    """A part of a batch, scored again. All tensors are ``[T]``."""

    batch: TensorDict
    known: torch.Tensor
    """bool, true for a trained token whose version is archived."""

    stamped: torch.Tensor
    """Log-probabilities under the version with which each token is stamped."""

    newest: torch.Tensor
    """Log-probabilities under the weights that are trained now."""

    compared: torch.Tensor
    """The same log-probabilities as ``stamped``, but computed in float32 if ``exact`` is true."""

    older: torch.Tensor
    """Log-probabilities under the version before the stamped one, computed like ``compared``; NaN if it is not archived."""

    exact: bool
    """True if ``compared`` and ``older`` have no rounding noise."""

    unknown_share: float
    """Share of this part's trained tokens that were not verified, because their version is not archived or they were left
    out."""


class Scorer:
    """Computes log-probabilities in the trainer, with the weights as they were delivered. All methods are collective."""

    def __init__(self, engine: TrainEngine, archive: VersionArchive | None, dtype: torch.dtype, team: Team, *, rounds: bool):
        """Makes a scorer.

        Args:
            archive: on rank 0; None on other ranks.
            dtype: dtype of the delivery.
            rounds: the engine computes in a wider dtype, so its own weights must be rounded to equal the delivered ones.
        """
        self.engine, self._archive, self._dtype, self._team, self._rounds = engine, archive, dtype, team, rounds
        self._names: frozenset[str] | None = None

    def kept(self) -> list[int]:
        """Archived versions that can be scored besides the newest, oldest first."""
        return self._team.share(lambda: self._archive.versions if self._archive is not None else [])

    @property
    def kept_gib(self) -> float:
        """GiB of the archived versions on this machine."""
        return 0.0 if self._archive is None else self._archive.num_bytes / 2**30

    def score(self, batch: TensorDict, number: int | None) -> torch.Tensor:
        """Returns log-probabilities ``[T]`` under an archived version; None: under the newest, the engine's own weights."""
        if number is None and not self._rounds:
            return self.engine.forward(batch).logprobs
        # an engine that serves float32 merges without rounding, so there the adapter itself is the more exact choice
        with self.engine.using(self.tensors(number) if self._rounds or number is None else self._kept(number)):
            return self.engine.forward(batch).logprobs

    def score_in_float32(self, batch: TensorDict, number: int | None) -> torch.Tensor | None:
        """Like `score`, without the rounding noise of a bfloat16 forward pass; None if the engine cannot compute that."""
        served = None if number is None and not self._rounds else self.tensors(number)
        with contextlib.nullcontext() if served is None else self.engine.using(served), self.engine.in_float32() as exact:
            return self.engine.forward(batch).logprobs if exact else None

    def tensors(self, number: int | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the whole weights of a version as they were served: an adapter is merged into its base, then rounded. A
        tensor is valid until the next is taken."""
        if number is None:
            for name, tensor in self.engine.weights():
                yield name, tensor.to(self._dtype)
            return
        stream, adapter = self._kept(number), self.engine.adapter
        first = next(stream, None)
        if first is not None:
            stream = itertools.chain([first], stream)
        if adapter is None or first is None or not _is_of_adapter(first[0]):
            yield from stream
            return
        for name, tensor in adapter.merged(dict(stream)):
            yield name, tensor.to(self._dtype)

    def surviving(self) -> float | None:
        """Returns the share of the last delivered adapter that survives rounding in the engine's weights; None if there is
        no adapter, if it changes nothing yet, or if the engine serves float32, where rounding is negligible."""
        if self.engine.adapter is None or self._dtype == torch.float32:
            return None
        return self.engine.adapter.surviving(self._dtype)

    def _kept(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of a version as they were delivered, which may be an adapter alone."""
        if self._names is None:
            adapter = () if self.engine.adapter is None else self.engine.adapter.weights()
            self._names = frozenset(name for stream in (self.engine.weights(), adapter) for name, _ in stream)
        names, archive = self._names, self._archive
        source = None if archive is None else archive.get(number)
        stream = () if source is None else source.tensors()
        # a run's first model folder may hold tied tensors twice, and in another dtype
        yield from self._team.spread((name, self._delivered(name, tensor)) for name, tensor in stream if name in names)

    def _delivered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if _is_of_adapter(name) else tensor.to(self._dtype)


log = logging.getLogger(__name__)

FIRST_STEPS = (1, 3)
"""Steps that are verified besides every `every_steps`-th. Step 1 is before any update, so it shows whether the engines agree
at all. Step 3 is the first that can tell an engine that is one version behind from one that never got an update."""

TOLERANCES = {torch.float32: 0.001, torch.bfloat16: 0.1}
"""Largest mean gap between log-probabilities, in nats. Agreeing engines were seen at 1e-5 in float32 and at 0.04 in
bfloat16."""

GROUP_FACTOR = 2.0
"""The mean gap of a single group, which one server generates, may be this many times the tolerance."""

MIN_TOKENS = 16
"""Groups with fewer tokens are not judged on their own, because single improbable tokens would decide."""

SIGMAS = 5.0
"""Evidence of at least this many standard errors decides whether an update arrived or is missing."""

TRAJECTORIES = 8
"""Number of trajectories that a verification scores, from different groups if possible."""

CONFIRMATIONS = 2
"""Number of verifications that must find an update missing before the run ends, if the gap is within the tolerance."""

POOL = 8
"""Most undecided verifications whose evidence is pooled: in bfloat16 one is often too few to show a small update."""

SURVIVING = 0.5
"""If less than this share of an adapter survives rounding, sampling lags behind training, and the user is warned."""


class Schedule:
    """Decides which steps are verified, and which versions must be kept for that.

    While an update is suspected to be missing, every step is verified and every version is kept.
    """

    def __init__(self, config: VerifyConfig, eta: int):
        """``eta``: `max_head_offpolicyness`, the highest age of a verified token, in versions."""
        self._every_steps, self._ages = config.every_steps, range(1, max(1, eta) + 1)
        self.suspicious = False

    def is_due(self, step: int) -> bool:
        """True if the batch of this step is verified."""
        every = self._every_steps
        return every is not None and (self.suspicious or step in FIRST_STEPS or step % every == 0)

    def wants(self, number: int) -> bool:
        """True if version ``number`` must be archived: a later batch that is verified may have tokens of this version or of
        the next."""
        return any(self.is_due(number + 1 + age) for age in self._ages)


class Verifier:
    """Verifies batches when a verification is due. Every rank makes one; its methods are collective."""

    def __init__(
        self,
        scorer: Scorer,
        config: VerifyConfig,
        dtype: torch.dtype,
        *,
        schedule: Schedule | None = None,
        trajectories: int = TRAJECTORIES,
        confirmations: int = CONFIRMATIONS,
        keeps_kv: bool = False,
        seed: int = 0,
    ):
        """``dtype``: the coarser of the dtypes of generation and training. ``schedule``: shared with the archive of
        versions. ``trajectories``: number of trajectories of a verification. ``confirmations``: number of verifications that
        must agree that an update is missing. ``keeps_kv``: tokens drawn after an update depend on older keys and values, so
        they are not verified."""
        self._scorer, self._trajectories, self._dtype = scorer, trajectories, dtype
        self._keeps_kv, self._seed = keeps_kv, seed
        self._warned = False
        self._version: Callable[[], int] = lambda: 0
        self._schedule, self._confirmations, self._missed = schedule or Schedule(config, eta=1), confirmations, 0
        self._pool: deque[Evidence] = deque(maxlen=POOL)
        self._undecided = 0
        self.tolerance = config.tolerance or TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])

    def follow(self, version: Callable[[], int]) -> None:
        """Sets the function ``version``, which returns the number of updates published so far."""
        self._version = version

    def verify_if_due(self, batch: TensorDict) -> dict[str, float]:
        """Returns metrics ``gap/*`` of this step's batch; without a due verification, only ``gap/adapter_surviving``.

        Raises:
            DeliveryDisproved: the trajectories were generated with other weights, temperature or tokens than recorded. The
                message names a missing update, or the version that fits, if there is one.
        """
        rounded, version = self._rounded(), self._version()
        return rounded | (self.verify(batch, version) if self._schedule.is_due(version + 1) else {})

    def state_dict(self) -> dict[str, Any]:
        """Returns the undecided evidence, and whether an update is suspected to be missing. The archived versions are in the
        publisher's state."""
        pool = [{"residual": e.residual, "step": e.step, "sequence": e.sequence} for e in self._pool]
        return {"pool": pool, "undecided": self._undecided, "missed": self._missed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the evidence and the suspicion by those of ``state``."""
        self._pool = deque((Evidence(**{k: v.clone() for k, v in part.items()}) for part in state["pool"]), maxlen=POOL)
        self._undecided, self._missed = int(state["undecided"]), int(state["missed"])
        self._schedule.suspicious = self._missed > 0

    def _rounded(self) -> dict[str, float]:
        """Returns the share of an adapter that is left in the served, rounded weights. Warns once if it is small."""
        share = self._scorer.surviving()
        if share is None:
            return {}
        if share < SURVIVING and not self._warned:
            self._warned = True
            log.warning(
                "only %.0f %% of the adapter is left in the bfloat16 weights that are served: its entries are smaller "
                "than the rounding error, so sampling lags behind training. Set rollout.dtype=float32, or a larger "
                "actor.optimizer.lr or actor.lora.alpha (docs/lora.md). This is logged once; see gap/adapter_surviving",
                100 * share,
            )
        return {"gap/adapter_surviving": share}

    def verify(self, batch: TensorDict, version: int) -> dict[str, float]:
        """Verifies a batch like `verify_if_due`, even if it is not due. ``version``: that of the weights in training."""
        chosen = choose(batch, self._trajectories, self._seed + version)
        verified = self.score(select(batch, chosen), version)
        total, count = int(trained_tokens(batch).sum()), int(verified.known.sum())
        share = {"gap/verified": count / max(1, total), "gap/unknown": verified.unknown_share}
        share["memory/kept_versions_gib"] = self._scorer.kept_gib
        if not count:
            log.warning("no token of the batch could be verified: the versions that generated its tokens are not archived")
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
        """Adds the evidence of this batch about the last update to the earlier evidence, and acts on the result.

        Raises:
            DeliveryDisproved: enough verifications in a row found the update missing.
        """
        comparable = verified.known & ~verified.older.isnan()
        if int(comparable.sum()) < MIN_TOKENS:
            return {}
        rollout, sequences = verified.batch["rollout_logprobs"], sequence_index(verified.batch)
        self._pool.append(
            Evidence.of(
                rollout[comparable], verified.compared[comparable], verified.older[comparable], sequences[comparable]
            )
        )
        together = Evidence.pooled(list(self._pool))
        metrics = {"gap/update_sigmas": together.sigmas}
        if abs(together.sigmas) < SIGMAS:
            self._count_undecided(version)
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

    def _count_undecided(self, version: int) -> None:
        """Ends the suspicion that an update is missing after `POOL` more undecided verifications, because each costs time
        and memory."""
        self._undecided += 1
        if self._missed and self._undecided >= POOL:
            self._missed, self._undecided, self._schedule.suspicious = 0, 0, False
            log.warning(
                "%d more verifications did not show whether the engine had the last update before version %d, so not every "
                "step is verified any longer; lower rollout.verify.every_steps for more evidence",
                POOL,
                version,
            )

    def score(self, part: TensorDict, version: int) -> Verified:
        """Scores a part of a batch under the versions of its tokens, and under the version before each of these."""
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
        """Returns scores without rounding noise; None if `_score` has none either, or the engine cannot compute them."""
        scores: dict[int, torch.Tensor] = {}
        for number in numbers if self._dtype != torch.float32 else ():
            scored = self._scorer.score_in_float32(part, None if number == newest else number)
            if scored is None:
                return None
            scores[number] = scored
        return scores or None

    def _mask(self, part: TensorDict) -> torch.Tensor:
        """Returns bool ``[T]``, True for trained tokens that can be verified: drawn with keys and values of their own
        version."""
        mask = trained_tokens(part)
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
            rows = groups == group
            if counts[rows].sum() >= MIN_TOKENS and sums[rows].sum() > GROUP_FACTOR * self.tolerance * counts[rows].sum():
                return True
        return False

    def _describe(self, verified: Verified, off: torch.Tensor, cause: str, *, within: bool) -> str:
        """Returns the message. ``within``: the gap is within the tolerance, and only its direction is wrong."""
        dtype = str(self._dtype).removeprefix("torch.")
        stamps, count = verified.batch["versions"][verified.known], int(verified.known.sum())
        named = str(int(stamps.min())) + (f" to {int(stamps.max())}" if stamps.min() < stamps.max() else "")
        if within:
            return (
                f"the trajectories of version {named} were not made as recorded. The mean difference to their scores under "
                f"the weights of their versions, {float(off.sum()) / count:.4g} nats over {count} tokens, is within the "
                f"tolerance ({self.tolerance:g} in {dtype}), but its direction shows an older version. Likely cause: {cause}"
            )
        return (
            f"the trajectories of version {named} were not made as recorded: scored again under the weights of their "
            f"versions, their log-probabilities differ by {float(off.sum()) / count:.4g} nats on average over {count} "
            f"tokens (tolerance {self.tolerance:g} in {dtype}). Likely cause: {cause}"
        )


def _by_stamp(stamps: torch.Tensor, scores: dict[int, torch.Tensor], *, age: int) -> torch.Tensor:
    """Returns the score of each token ``[T]`` under the version ``age`` before its stamp; NaN if that was not scored."""
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
"""Missing share above which an update counts as missing as a whole."""


def missing_update(sigmas: float, share: float | None) -> str:
    """Names the cause of a gap that shows only by its direction. ``sigmas``: its size in standard errors. ``share``: the
    missing part of the update; None if rounding hides its size."""
    extent = "all or most" if share is None else "all" if share > WHOLE else "a part"
    regression = "" if share is None else f"{share:.0%} by regression, "
    return (
        f"{extent} of the last update before their version is missing ({regression}{sigmas:.0f} standard errors), which is "
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
        or "unknown, because no kept version fits. Restart the server, make sure that it flushes its prefix cache with each "
        "update, and compare its model folder, tokenizer and temperature with the trainer's"
    )


def _off(verified: Verified, scored: torch.Tensor, known: torch.Tensor) -> float:
    """Returns the mean gap between ``scored`` and the engine's log-probabilities over the ``known`` tokens; all ``[T]``."""
    rollout = verified.batch["rollout_logprobs"]
    return float(gap(scored.nan_to_num(0.0), rollout, known).sum()) / max(1, int(known.sum()))


def _affected(verified: Verified, tolerance: float) -> tuple[list[int], int]:
    """Returns the groups whose gap is above the tolerance, and the number of groups with known tokens."""
    groups = verified.batch["group_id"][sequence_index(verified.batch)]
    named = groups[verified.known].unique().tolist()
    return [g for g in named if _off(verified, verified.stamped, verified.known & (groups == g)) > tolerance], len(named)


def _wrong_version(verified: Verified, known: torch.Tensor, version: int, tolerance: float, scorer: Scorer) -> str:
    """Explains a gap by one version that generated all tokens, or by stamps one version too new; empty if neither fits."""
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
            f"they are from version {fitting}, newer than recorded: the server switched before it stamped. It must stamp "
            "each token with the weights that made it"
        )
    if fitting is not None and (not behind or newest - fitting > 1 or fitting == 0):
        late = " (or they are stamped one version too new)" if behind and newest == 1 else ""
        return (
            f"all of them are from version {fitting}: no later update was applied, though the server reported it{late}. "
            "Restart the server, and look in its log for the update"
        )
    if behind:
        recorded = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
        return (
            f"they are stamped one version too new: those of {recorded} are from the version before, or the last update "
            "came after its stamp. The stamp must come from the server that computes, not from the client"
        )
    return ""
