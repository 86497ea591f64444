"""Proof of delivery: trajectories are scored again under the weights of the versions that they are stamped with.

Consumes the batch of a step before it is trained on; changes nothing. A server that serves other weights than it says, at
another temperature or over another text, shows in the difference of log-probabilities; the run ends with the likely cause.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.algorithms.gap import gap, missing_share
from tandem.api.batch import per_token, select, sequence_index, sum_by_sequence
from tandem.api.failures import DeliveryDisproved
from tandem.config.delivery import VerifyConfig
from tandem.roles.samples import trained_tokens
from tandem.trainers.diagnosis import Case, diagnose
from tandem.trainers.scoring import Scorer
from tandem.trainers.tokenisation import explained_by_tokenisation

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

MISSING, SIGMAS = 0.5, 8.0
"""An update counts as missing where this share of it is, and so clearly, also where the gap is within the tolerance."""

SURVIVING = 0.5
"""Where rounding leaves less than this share of an adapter, sampling lags behind training, and the user is told."""


def is_due(config: VerifyConfig, step: int) -> bool:
    """Whether the batch of this step is verified."""
    return config.every_steps is not None and (step in FIRST_STEPS or step % config.every_steps == 0)


def is_wanted(config: VerifyConfig, eta: int) -> Callable[[int], bool]:
    """Which versions have to be kept: those that a verified batch may hold tokens of, and the one before its newest."""
    return lambda number: any(is_due(config, number + 1 + age) for age in range(1, max(1, eta) + 1))


@dataclass(frozen=True)
class Verified:
    """A part of a batch, scored again. All tensors are ``[T]`` of it."""

    batch: TensorDict
    known: torch.Tensor
    """bool: a trained token whose version is kept."""

    stamped: torch.Tensor
    """Log-probabilities under the version that each token is stamped with."""

    newest: torch.Tensor
    """Under the weights that train now."""

    older: torch.Tensor
    """Under the version before the stamped one; NaN where that is not kept."""

    unknown_share: float
    """Trained tokens of this part that were not verified: their version is not kept, or they are left out on purpose."""


class Verifier:
    """Verifies a batch where one is due. Every rank makes one; what it does is collective."""

    def __init__(
        self,
        scorer: Scorer,
        config: VerifyConfig,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype,
        *,
        keeps_kv: bool = False,
        hot_first_token: bool = False,
        seed: int = 0,
    ):
        """``dtype``: the coarser one of generation and training. ``keeps_kv``: tokens after an update stand on keys and
        values of before, so they are not verified. ``hot_first_token``: nor is the first token of a reply, drawn at another
        temperature."""
        self._scorer, self._config, self._tokenizer, self._dtype = scorer, config, tokenizer, dtype
        self._keeps_kv, self._hot_first_token, self._seed = keeps_kv, hot_first_token, seed
        self._warned = False
        self.tolerance = config.tolerance or TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])

    def verify_if_due(self, batch: TensorDict, step: int) -> dict[str, float]:
        """``gap/*`` of the batch of this step, made when ``step - 1`` updates were published; where none is due only what
        rounding leaves of an adapter.

        Raises:
            DeliveryDisproved: other weights, temperature or tokens than are stamped; names the likely cause.
        """
        rounded = self._rounded()
        return rounded | (self.verify(batch, step - 1) if is_due(self._config, step) else {})

    def _rounded(self) -> dict[str, float]:
        """What is left of an adapter in the rounded weights that are served; warns once where that is little."""
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
        """As `verify_if_due`, always. ``version``: of the weights that train now."""
        chosen = choose(batch, self._config.trajectories, self._seed + version)
        found = self.score(select(batch, chosen), version)
        total, count = int(trained_tokens(batch).sum()), int(found.known.sum())
        share = {"gap/verified": count / max(1, total), "gap/unknown": found.unknown_share}
        share["memory/kept_versions_gib"] = self._scorer.kept_gib
        if not count:
            log.warning("no token of the batch could be verified: the versions that made them are not kept")
            return share
        rollout = found.batch["rollout_logprobs"]
        off = gap(found.stamped, rollout, found.known)
        explained = explained_by_tokenisation(
            found.batch, off, found.known, self.tolerance, self._tokenizer, lambda b: self._scorer.score(b, None)
        )
        lag, sigmas = self._missing(found)
        metrics = {
            "gap/numeric": float((off - explained).sum()) / count,
            "gap/stale": float(gap(found.newest, found.stamped, found.known).sum()) / count,
            "gap/tokenisation": float(explained.sum()) / count,
            "gap/missing_update": lag,
        }
        is_off = self._is_off(found, off)
        if is_off or (lag > MISSING and sigmas > SIGMAS and count >= MIN_TOKENS):
            raise DeliveryDisproved(self._describe(found, off, version, missing=0.0 if is_off else lag))
        return share | metrics

    def score(self, part: TensorDict, version: int) -> Verified:
        """Scores a part of a batch under every version that its tokens, or those of the version before, need."""
        mask, stamps, kept = self._mask(part), part["versions"], set(self._scorer.kept())
        scores: dict[int, torch.Tensor] = {version: self._scorer.score(part, None)}
        needed = {int(n) - age for n in stamps[mask].unique() for age in (0, 1)}
        for number in sorted(needed & kept - {version}):
            scores[number] = self._scorer.score(part, number)
        nothing = torch.full_like(scores[version], torch.nan)
        stamped, older = nothing.clone(), nothing.clone()
        for number, scored in scores.items():
            stamped = torch.where(stamps == number, scored, stamped)
            older = torch.where(stamps == number + 1, scored, older)
        known = mask & ~stamped.isnan()
        trained = int(trained_tokens(part).sum())
        unknown = 1 - int(known.sum()) / trained if trained else 1.0
        return Verified(part, known, stamped.nan_to_num(0.0), scores[version], older, unknown)

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

    def _missing(self, found: Verified) -> tuple[float, float]:
        """`missing_share` of the tokens whose version before is kept."""
        both = found.known & ~found.older.isnan()
        if not bool(both.any()):
            return 0.0, 0.0
        return missing_share(found.batch["rollout_logprobs"][both], found.stamped[both], found.older[both])

    def _is_off(self, found: Verified, off: torch.Tensor) -> bool:
        counts = sum_by_sequence(found.batch, found.known.float())
        sums = sum_by_sequence(found.batch, off)
        if float(sums.sum()) > self.tolerance * float(counts.sum()):
            return True
        groups = found.batch["group_id"]
        for group in groups.unique():
            mine = groups == group
            if counts[mine].sum() >= MIN_TOKENS and sums[mine].sum() > GROUP_FACTOR * self.tolerance * counts[mine].sum():
                return True
        return False

    def _describe(self, found: Verified, off: torch.Tensor, version: int, missing: float) -> str:
        case = Case(found.batch, found.known, found.stamped, found.older, version, self.tolerance, missing)
        cause = diagnose(case, self._scorer, self._tokenizer)
        dtype = str(self._dtype).removeprefix("torch.")
        stamps, count = found.batch["versions"][found.known], int(found.known.sum())
        named = str(int(stamps.min())) + (f" to {int(stamps.max())}" if stamps.min() < stamps.max() else "")
        return (
            f"the trajectories of version {named} were not made as they say: scored again under the weights of their "
            f"versions, their log-probabilities differ by {float(off.sum()) / count:.4g} nats on average over {count} "
            f"tokens (tolerance {self.tolerance:g} in {dtype}). Likely cause: {cause}"
        )


def choose(batch: TensorDict, count: int, seed: int) -> torch.Tensor:
    """Indices ``[≤ count]`` of trajectories with trained tokens: of as many groups as there are, otherwise at random."""
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
