"""The places of the tokens of a packed batch in a forward pass.

All of it follows from numbers that the host has: lengths, masks, prompts. It is worked out there, before the device is asked
for anything, so a pass on a GPU does not make the host wait.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from tandem.models.attention import Packing, check_lengths, positions
from tandem.models.context_parallel import Context
from tandem.models.prefixes import compact
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
class TokenLayout:
    """The layout of T packed tokens, C of which are computed: a prompt that several sequences share is computed once."""

    total: int
    """T."""

    ids: torch.Tensor
    """``[C]``; under context parallelism this rank's part."""

    at: torch.Tensor
    """``[C]``: position of each in its sequence."""

    packing: Packing
    place: torch.Tensor | None
    """``[T]``: the row of each token; None where C = T and every token has its own."""

    prediction: Prediction | None
    """The positions that are predicted; None if there are none."""


def lay_out(
    input_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    loss_mask: torch.Tensor,
    temperature: torch.Tensor | None,
    *,
    device: torch.device,
    context: Context | None = None,
) -> TokenLayout:
    """The layout of ``input_ids [T]``, ``cu_seqlens [N + 1]``, with its tensors on ``device``.

    A prompt is what comes before the first token in ``loss_mask [T]``; causal attention makes its states the same in all
    sequences that begin with it. ``temperature [N]``: None: nothing is predicted.

    Raises:
        ValueError: the bounds do not cover the tokens.
    """
    total = len(input_ids)
    bounds = check_lengths(cu_seqlens, total)
    ids, at = input_ids, positions(cu_seqlens, total)
    shares = context is None or context.way == "all_to_all"
    shared = compact(input_ids, bounds, loss_mask) if shares else None
    if shared is None:
        packing, place = Packing.from_cu_seqlens(cu_seqlens), None
    else:
        packing, place = Packing.from_prompts(cu_seqlens, shared.prompts), shared.place
        ids, at = ids[shared.tokens], at[shared.tokens]
    mine = slice(0, len(ids))
    if context is not None:
        extra = context.padding(len(ids))
        mine = context.rows(len(ids) + extra)
        ids, at = pad(ids, (0, extra))[mine], pad(at, (0, extra))[mine]
        packing = packing.divided(context, extra)
    prediction = None
    if temperature is not None:
        index = _predicted(bounds, loss_mask)
        before = index - 1 if place is None else place[index - 1]
        if context is not None:
            own = (before >= mine.start) & (before < mine.stop)
            index, before = index[own], before[own] - mine.start
        of_token = None
        if bool((temperature != 1).any()):
            of_token = torch.repeat_interleave(temperature, cu_seqlens.diff(), output_size=total)[index].float()
        prediction = Prediction(index, before, input_ids[index], of_token)
    return _on(TokenLayout(total, ids, at, packing, place, prediction), device)


def _predicted(bounds: list[int], loss_mask: torch.Tensor) -> torch.Tensor:
    """The tokens of the mask that have one before them in their sequence, ``[M]``."""
    predicted = loss_mask.clone()
    predicted[[start for start, end in zip(bounds, bounds[1:], strict=False) if start < end]] = False
    return predicted.nonzero().flatten()


def _on(layout: TokenLayout, device: torch.device) -> TokenLayout:
    """The same with its tensors on a device."""

    def there(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else upload(tensor, device)

    wanted = layout.prediction
    if wanted is not None:
        wanted = Prediction(*(there(x) for x in (wanted.index, wanted.before, wanted.targets, wanted.temperature)))  # type: ignore[arg-type]
    packing = layout.packing.on(device)
    return replace(
        layout,
        ids=upload(layout.ids, device),
        at=upload(layout.at, device),
        packing=packing,
        place=there(layout.place),
        prediction=wanted,
    )
