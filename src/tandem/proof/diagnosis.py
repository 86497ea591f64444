"""Why trajectories do not score as they say: each usual cause is a hypothesis that the trainer can compute.

The first whose scores come within the tolerance is named. Nothing here is trained; weights come back to the bit.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import nn
from transformers import PreTrainedTokenizerBase

from tandem.algorithms.gap import gap
from tandem.api.batch import select, sequence_index, sum_by_sequence
from tandem.proof.scoring import Scorer
from tandem.proof.tokenisation import best_variant

PROJECTIONS = ("k_proj", "v_proj", "k_norm")
"""Modules whose results, ``[1, T, …]``, go into the cache: behind them there are only rotations without weights."""


def _projections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in PROJECTIONS:
            yield name, module


@contextlib.contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Collects the keys and values of the forward pass inside, of one sequence."""
    found: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in _projections(model):

        def keep(module: nn.Module, inputs: object, output: torch.Tensor, name: str = name) -> None:
            found[name] = output.detach().clone()

        handles.append(module.register_forward_hook(keep))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def replaying(model: nn.Module, recorded: Mapping[str, torch.Tensor], tokens: int) -> Iterator[None]:
    """The forward pass inside takes the keys and values of the first ``tokens`` tokens from ``recorded``."""
    handles = []
    for name, module in _projections(model):

        def replace(module: nn.Module, inputs: object, output: torch.Tensor, name: str = name) -> torch.Tensor:
            return torch.cat([recorded[name][:, :tokens], output[:, tokens:]], 1)

        handles.append(module.register_forward_hook(replace))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


BUDGET_S = 60.0
"""For the search of a single tensor, which scores once a tensor."""

KEY_SEQUENCES = 4
BLOCKS = (1, 16, 32, 64, 128)
"""Prefix caches keep whole blocks of so many tokens."""

WHOLE = 0.75
"""From this share on an update is missing as a whole."""

ELSEWHERE = 3.0
"""A gap so many times larger than the last update is no matter of old weights."""


@dataclass(frozen=True)
class Missing:
    """An update that is missing although the gap is within the tolerance: only the gap's direction shows it."""

    sigmas: float
    """Standard errors by which the evidence says so."""

    share: float | None
    """The part of the update that is missing; None if rounding hides how large it is."""


@dataclass(frozen=True)
class Case:
    """Sequences that are off. Tensors are ``[T]`` of the batch."""

    batch: TensorDict
    known: torch.Tensor
    """bool: tokens that were scored under the version that they are stamped with."""

    stamped: torch.Tensor
    older: torch.Tensor
    """Under the version before; NaN where that is not kept."""

    version: int
    """Version of the weights that train now."""

    tolerance: float
    missing: Missing | None = None

    @property
    def rollout(self) -> torch.Tensor:
        return self.batch["rollout_logprobs"]

    def off(self, scored: torch.Tensor, among: torch.Tensor | None = None) -> float:
        """Mean gap to these scores, over the known tokens (``among``, ``[T]`` bool)."""
        mask = self.known if among is None else self.known & among
        return float(gap(scored.nan_to_num(0.0), self.rollout, mask).sum()) / max(1, int(mask.sum()))

    def sequences(self, index: torch.Tensor) -> "Case":
        """The case of some of the sequences, ``[N]`` bool."""
        tokens = index[sequence_index(self.batch)]
        return Case(
            select(self.batch, index),
            self.known[tokens],
            self.stamped[tokens],
            self.older[tokens],
            self.version,
            self.tolerance,
        )


def diagnose(case: Case, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> str:
    """The likely cause, and what to do. Collective."""
    if case.missing is not None:
        return _too_small_to_see(case.missing)
    wrong, right = _by_group(case)
    where = ""
    if wrong and right:
        count = len(wrong) + len(right)
        where = f"only {len(wrong)} of {count} prompts are affected, as when one of several servers is wrong: "
        groups = case.batch["group_id"]
        case = case.sequences(torch.isin(groups, torch.tensor(wrong, dtype=groups.dtype)))
    for hypothesis in (_versions, _temperature, _tokenisation, _kept_keys, one_tensor):
        cause = hypothesis(case, scorer, tokenizer)
        if cause:
            return where + cause
    return where + _rest(case)


def _too_small_to_see(missing: Missing) -> str:
    much = "all or most" if missing.share is None else "all" if missing.share > WHOLE else "a part"
    share = "" if missing.share is None else f"{missing.share:.0%} by regression, "
    return (
        f"{much} of the last update before their version is missing ({share}{missing.sigmas:.0f} standard errors), which is "
        "too small to see token by token: they are stamped one version too new, or the server did not apply it. Restart the "
        "server, and look in its log for the update"
    )


def _by_group(case: Case) -> tuple[list[int], list[int]]:
    """Groups that are off, and those that are not."""
    sums = sum_by_sequence(case.batch, gap(case.stamped, case.rollout, case.known))
    counts = sum_by_sequence(case.batch, case.known.float())
    wrong, right = [], []
    for group in case.batch["group_id"].unique().tolist():
        mine = case.batch["group_id"] == group
        if counts[mine].sum():
            (wrong if sums[mine].sum() > case.tolerance * counts[mine].sum() else right).append(group)
    return wrong, right


def _versions(case: Case, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> str:
    """All tokens by one version, whatever they say; or each by the version before the one that it says."""
    stamps = case.batch["versions"][case.known]
    newest, oldest = int(stamps.max()), int(stamps.min())
    offs = {number: case.off(scorer.score(case.batch, number)) for number in scorer.kept() if number != case.version}
    offs[case.version] = case.off(scorer.score(case.batch, None))
    if newest == oldest:
        offs.pop(newest, None)
    limit = min(case.tolerance, case.off(case.stamped) / 2)
    one = min(offs, key=lambda number: offs[number], default=None)
    one = one if one is not None and offs[one] <= limit else None
    behind = not bool(case.older[case.known].isnan().any()) and case.off(case.older) <= limit
    if one is not None and one > oldest:
        return (
            f"they are from version {one}, newer than they say: the server switched before it stamped. It must stamp each "
            "token with the weights that made it"
        )
    if one is not None and (not behind or newest - one > 1 or one == 0):
        late = " (or they are stamped one version too new)" if behind and newest == 1 else ""
        return (
            f"all of them are from version {one}: no update after it was ever applied, though the server said so{late}. "
            "Restart the server, and look in its log for the update"
        )
    if behind:
        said = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
        return (
            f"they are stamped one version too new: those that say {said} are from the version before, or the last update "
            "came after its stamp. The stamp must come from the server that computes, not from the client"
        )
    return ""


def _temperature(case: Case, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> str:
    """Golden-section search for the temperature under which the newest tokens fit."""
    among = case.batch["versions"] == int(case.batch["versions"][case.known].max())
    number = int(case.batch["versions"][case.known].max())
    asked = case.batch["temperature"]

    def off(log_factor: float) -> float:
        batch = case.batch.clone(recurse=False)
        batch["temperature"] = asked * math.exp(log_factor)
        return case.off(scorer.score(batch, None if number == case.version else number), among)

    low, high, ratio = math.log(0.2), math.log(5.0), (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    found = {left: off(left), right: off(right)}
    for _ in range(40):
        if min(found.values()) <= case.tolerance / 10:
            break
        if found[left] < found[right]:
            high, right, left = right, left, right - ratio * (right - low)
            found[left] = off(left)
        else:
            low, left, right = left, right, left + ratio * (high - left)
            found[right] = off(right)
        if high - low < 1e-6:
            break
    best = min(found, key=lambda factor: found[factor])
    if found[best] > case.tolerance:
        return ""
    wanted = float(asked.mean())
    return (
        f"another temperature: they fit {wanted * math.exp(best):.3g} where {wanted:.3g} was asked for. The server ignored "
        "the temperature, or its log-probabilities are of another one (vLLM needs --logprobs-mode processed_logprobs)"
    )


def _tokenisation(case: Case, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> str:
    told: dict[str, int] = {}
    count = len(case.batch["cu_seqlens"]) - 1
    for index in range(count):
        found = best_variant(case.batch, index, case.known, tokenizer, lambda batch: scorer.score(batch, None))
        if found is not None and float(found[1].mean()) <= case.tolerance:
            told[found[0]] = told.get(found[0], 0) + 1
    if not told or sum(told.values()) < 0.5 * count:
        return ""
    what = max(told, key=lambda name: told[name])
    return f"the server read the prompt {what}: it must be given token ids, not text, and add nothing to them"


def _kept_keys(case: Case, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> str:
    """Tokens of the newest version that stand on keys and values of the one before."""
    model, older = getattr(scorer.engine, "model", None), case.version - 1
    if older not in scorer.kept() or not isinstance(model, nn.Module) or getattr(scorer.engine, "world_size", 1) > 1:
        return ""
    new = case.known & (case.batch["versions"] == case.version)
    index = (sum_by_sequence(case.batch, new.float()) > 0).nonzero().flatten()[:KEY_SEQUENCES]
    parts = list(_single(case, new, index.tolist()))
    kept = []
    with scorer.engine.using(scorer.tensors(older)):
        for part, _, _ in parts:
            with recording(model) as found:
                scorer.engine.forward(part.batch)
            kept.append(found)
    for block in BLOCKS:
        off, count = 0.0, 0
        for (part, mine, first), found in zip(parts, kept, strict=True):
            with replaying(model, found, (first - 1) // block * block):
                scored = scorer.score(part.batch, None)
            off, count = off + part.off(scored, mine) * int(mine.sum()), count + int(mine.sum())
        if count and off <= case.tolerance * count:
            return (
                f"keys and values of version {older} were kept over the update to {case.version} (a prefix cache that was "
                "not flushed, or running requests that were not computed again). Flush the cache with each update, or set "
                "rollout.engine.keep_kv_on_update=true if it is meant"
            )
    return ""


def _single(case: Case, new: torch.Tensor, index: list[int]) -> Iterator[tuple[Case, torch.Tensor, int]]:
    """For each sequence: a case of its own, its new tokens ``[S]``, and the place of the first of them."""
    for i in index:
        one = torch.zeros(len(case.batch["cu_seqlens"]) - 1, dtype=torch.bool)
        one[i] = True
        mine = new[one[sequence_index(case.batch)]]
        yield case.sequences(one), mine, int(mine.nonzero()[0])


def one_tensor(case: Case, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> str:
    """Tokens of the newest version, with one tensor of the version before."""
    older, engine = case.version - 1, scorer.engine
    new = case.batch["versions"] == case.version
    if older not in scorer.kept() or getattr(engine, "world_size", 1) > 1 or not bool((case.known & new).any()):
        return ""
    newest = {name: tensor.clone() for name, tensor in scorer.tensors(None)}
    deadline = time.monotonic() + BUDGET_S
    for name, tensor in scorer.tensors(older):
        if time.monotonic() > deadline:
            break
        if torch.equal(tensor, newest[name]):
            continue
        scored = scorer.score_with_one_from(case.batch, newest, name, tensor)
        if case.off(scored, new) <= case.tolerance:
            return (
                f"tensor {name} is still that of version {older}: a part of the update to {case.version} was lost on the "
                "server. Restart the server, and report it with the output of `tandem doctor`"
            )
    return ""


def _rest(case: Case) -> str:
    """Nothing fits; the size of the gap, beside that of an update, says where to look."""
    both = ~case.older.isnan()
    if not bool((case.known & both).any()):
        return (
            "none of those that can be computed. Compare the server's model folder and tokenizer with the trainer's, and "
            "restart the server"
        )
    step = case.older.nan_to_num(0.0) - case.stamped
    update = float((step.abs() * (case.known & both)).sum()) / int((case.known & both).sum())
    off = case.off(case.stamped, both)
    if off > ELSEWHERE * update:
        return (
            f"another tokenizer or another model on the server: the gap is {off:.3g} nats, while an update changes "
            f"{update:.2g}, so no age of the weights explains it. Compare tokenizer.json and config.json there with those "
            "of the trainer"
        )
    return (
        "a part of the weights, or of the keys and values, is of an older version. Restart the server, and flush its prefix "
        "cache with each update"
    )
