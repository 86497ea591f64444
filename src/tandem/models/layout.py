"""The places of the tokens of a packed batch in a forward pass.

All of it follows from numbers that the host has: lengths, masks, prompts. It is worked out there, before the device is asked
for anything, so a pass on a GPU does not make the host wait.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from tandem.api.failures import BatchError
from tandem.api.media import occurrences
from tandem.media import store
from tandem.models.attention import Packing, check_lengths, positions
from tandem.models.context_parallel import Context
from tandem.models.media.family import MediaFamily
from tandem.models.prefixes import compact, prompt_keys
from tandem.models.upload import upload


@dataclass(frozen=True)
class Prediction:
    """The tokens whose log-probabilities are wanted, M of them."""

    index: torch.Tensor
    """``[M]``: which of the T tokens they are."""

    before: torch.Tensor
    """``[M]``: the row of the state before each, which predicts it."""

    targets: torch.Tensor
    """``[M]``: the tokens themselves."""

    temperature: torch.Tensor | None
    """``[M]``; None: all are 1."""


@dataclass(frozen=True)
class MediaRows:
    """The tokens in whose place rows of features stand, P of them."""

    numbers: tuple[int, ...]
    """The media, each once; their features stand one after another."""

    place: torch.Tensor
    """``[P]``: which of the computed tokens they are."""

    row: torch.Tensor
    """``[P]``: the row of features of each."""


@dataclass(frozen=True)
class TokenLayout:
    """The layout of T packed tokens, C of which are computed: a prompt that several sequences share is computed once."""

    total: int
    """T."""

    ids: torch.Tensor
    """``[C]``; under context parallelism this rank's part."""

    at: torch.Tensor
    """``[C]``: position of each in its sequence; ``[C, 3]`` where rotary positions are three-dimensional."""

    packing: Packing
    place: torch.Tensor | None
    """``[T]``: the row of each token; None where C = T and every token has its own."""

    prediction: Prediction | None
    """The positions that are predicted; None if there are none."""

    media: MediaRows | None = None
    """The places of features; None if all is text."""


def lay_out(
    input_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    loss_mask: torch.Tensor,
    temperature: torch.Tensor | None,
    *,
    device: torch.device,
    context: Context | None = None,
    media: torch.Tensor | None = None,
    family: MediaFamily | None = None,
) -> TokenLayout:
    """The layout of ``input_ids [T]``, ``cu_seqlens [N + 1]``, with its tensors on ``device``.

    A prompt is what comes before the first token in ``loss_mask [T]``; causal attention makes its states the same in all
    sequences that begin with it. ``temperature [N]``: None: nothing is predicted. ``media [T]``: media numbers of the
    tokens, for a model of ``family``; None: all are text.

    Raises:
        ValueError: the bounds do not cover the tokens.
    """
    total = len(input_ids)
    bounds = check_lengths(cu_seqlens, total)
    if media is not None and not bool(media.any()):
        media = None
    ids, at = input_ids, positions(cu_seqlens, total)
    if family is not None and family.three_dimensional:
        at = _family_positions(family, ids, bounds, media)
    media_rows = None if media is None else _media_rows(family, media, bounds)
    shares = context is None or context.way == "all_to_all"
    shared = compact(prompt_keys(ids, media), bounds, loss_mask) if shares else None
    if shared is None:
        packing, place = Packing.from_cu_seqlens(cu_seqlens), None
    else:
        packing, place = Packing.from_prompts(cu_seqlens, shared.prompts), shared.place
        ids, at = ids[shared.tokens], at[shared.tokens]
        media_rows = None if media_rows is None else _among(media_rows, shared.tokens)
    local = slice(0, len(ids))
    if context is not None:
        extra = context.padding(len(ids))
        local = context.rows(len(ids) + extra)
        ids, at = pad(ids, (0, extra))[local], pad(at, (0, extra))[local]
        packing = packing.divided(context, extra)
    prediction = None
    if temperature is not None:
        index = _predicted(bounds, loss_mask)
        before = index - 1 if place is None else place[index - 1]
        if context is not None:
            is_local = (before >= local.start) & (before < local.stop)
            index, before = index[is_local], before[is_local] - local.start
        of_token = None
        if bool((temperature != 1).any()):
            of_token = torch.repeat_interleave(temperature, cu_seqlens.diff(), output_size=total)[index].float()
        prediction = Prediction(index, before, input_ids[index], of_token)
    return _on(TokenLayout(total, ids, at, packing, place, prediction, media_rows), device)


def _media_rows(family: MediaFamily | None, media: torch.Tensor, bounds: Sequence[int]) -> MediaRows:
    """The rows of features that the T tokens take."""
    if family is None:
        raise BatchError("the batch has images or sounds, and this model reads text alone")
    numbers = tuple(dict.fromkeys(media[media != 0].tolist()))
    count = {number: family.count(store.medium(number)) for number in numbers}
    begin = dict(zip(numbers, [0, *itertools.accumulate(count.values())], strict=False))
    sequences = ((start, media[start:end].tolist()) for start, end in zip(bounds, bounds[1:], strict=False))
    places = [
        (start + one.place, begin[one.number] + one.row)
        for start, of_sequence in sequences
        for one in occurrences(of_sequence, count)
    ]
    place, row = torch.tensor(places).T
    return MediaRows(numbers, place, row)


def _among(rows: MediaRows, tokens: torch.Tensor) -> MediaRows:
    """The same where only ``tokens [C]`` of the batch are computed."""
    of_token = torch.full((int(tokens.max()) + 1,), -1)
    inside = rows.place < len(of_token)
    of_token[rows.place[inside]] = rows.row[inside]
    row = of_token[tokens]
    place = (row >= 0).nonzero().flatten()
    return replace(rows, place=place, row=row[place])


def _family_positions(
    family: MediaFamily, ids: torch.Tensor, bounds: Sequence[int], media: torch.Tensor | None
) -> torch.Tensor:
    """``[T, 3]``."""
    numbers = torch.zeros_like(ids) if media is None else media
    parts = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        sequence = numbers[start:end]
        media_of_sequence = [store.medium(number) for number in dict.fromkeys(sequence[sequence != 0].tolist())]
        parts.append(family.positions(ids[start:end], sequence, media_of_sequence))
    return torch.cat(parts)


def _predicted(bounds: list[int], loss_mask: torch.Tensor) -> torch.Tensor:
    """The tokens of the mask that have one before them in their sequence, ``[M]``."""
    predicted = loss_mask.clone()
    predicted[[start for start, end in zip(bounds, bounds[1:], strict=False) if start < end]] = False
    return predicted.nonzero().flatten()


def _on(layout: TokenLayout, device: torch.device) -> TokenLayout:
    """The same with its tensors on a device."""

    def there(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else upload(tensor, device)

    prediction = layout.prediction
    if prediction is not None:
        prediction = Prediction(
            *(there(x) for x in (prediction.index, prediction.before, prediction.targets, prediction.temperature))
        )  # type: ignore[arg-type]
    packing, media = layout.packing.on(device), layout.media
    if media is not None:
        media = replace(media, place=upload(media.place, device), row=upload(media.row, device))
    return replace(
        layout,
        ids=upload(layout.ids, device),
        at=upload(layout.at, device),
        packing=packing,
        place=there(layout.place),
        prediction=prediction,
        media=media,
    )
