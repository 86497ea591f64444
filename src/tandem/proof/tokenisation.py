"""Was the text cut into tokens anew on its way? Tries the ways in which that usually happens, by scoring them."""

from collections.abc import Callable

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.algorithms.gap import gap
from tandem.api.batch import pack, sum_by_sequence


def variants(prompt: list[int], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token sequences that a server may have made of a prompt that it got as text; without the prompt itself."""
    bos = tokenizer.bos_token_id
    text, plain = tokenizer.decode(prompt), tokenizer.decode(prompt, skip_special_tokens=True)
    found = [
        tokenizer.encode(plain, add_special_tokens=False),
        tokenizer.encode(text, add_special_tokens=False),
        tokenizer.encode(text),
    ]
    if bos is not None:
        found.append([bos, *prompt])
        if prompt[0] == bos:
            found.append(prompt[1:])
    return [variant for variant in found if variant and variant != prompt]


def best_variant(
    batch: TensorDict,
    index: int,
    known: torch.Tensor,
    tokenizer: PreTrainedTokenizerBase,
    score: Callable[[TensorDict], torch.Tensor],
) -> torch.Tensor | None:
    """The gap of each ``known`` token ``[K]`` of sequence ``index`` under the variant that comes nearest to what the engine
    said; None where every variant is the prompt itself."""
    start, end = (int(x) for x in batch["cu_seqlens"][index : index + 2])
    mine = known[start:end]
    if not bool(mine.any()):
        return None
    size = int(batch["loss_mask"][start:end].nonzero()[0])
    ids, temperature = batch["input_ids"][start:end], batch["temperature"][index]
    found = []
    for variant in variants(ids[:size].tolist(), tokenizer):
        prompt = torch.tensor(variant)
        mask = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), batch["loss_mask"][start + size : end]])
        row = {"input_ids": torch.cat([prompt, ids[size:]]), "loss_mask": mask, "temperature": temperature}
        scored = score(pack([row]))[len(prompt) :]
        wanted = mine[size:]
        rollout = batch["rollout_logprobs"][start + size : end]
        found.append(gap(scored, rollout, wanted)[wanted])
    return min(found, key=lambda off: float(off.mean())) if found else None


def explained_by_tokenisation(
    batch: TensorDict,
    off: torch.Tensor,
    known: torch.Tensor,
    tolerance: float,
    tokenizer: PreTrainedTokenizerBase,
    score: Callable[[TensorDict], torch.Tensor],
) -> torch.Tensor:
    """The part of each token's gap ``off [T]`` that goes away when the prompt is tokenised otherwise, ``[T]``.

    Only sequences that are off by more than ``tolerance`` are tried; of the others it is 0. Collective, as ``score`` is.
    """
    explained = torch.zeros_like(off)
    counts, sums = sum_by_sequence(batch, known.float()), sum_by_sequence(batch, off)
    for index in (sums > tolerance * counts).nonzero().flatten().tolist():
        found = best_variant(batch, index, known, tokenizer, score)
        start, end = (int(x) for x in batch["cu_seqlens"][index : index + 2])
        if found is not None and float(found.mean()) <= tolerance:
            place = known[start:end].nonzero().flatten() + start
            explained[place] = (off[place] - found).clamp(min=0.0)
    return explained
