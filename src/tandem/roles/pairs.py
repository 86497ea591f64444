"""Pairs in a packed batch: two sequences with one ``unit_id``, of which one is ``chosen``."""

from __future__ import annotations

from tandem.api.batch import num_sequences, pack, unpack
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch


def pairs_of(batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the better and of the worse sequence of each pair, ``[P]`` each.

    Raises:
        BatchError: a unit is not one chosen sequence and one that is not.
    """
    chosen, units = batch["chosen"], batch["unit_id"]
    better, worse = chosen.nonzero().flatten(), (~chosen).nonzero().flatten()
    better, worse = better[units[better].argsort()], worse[units[worse].argsort()]
    if (
        len(better) != len(worse)
        or not torch.equal(units[better], units[worse])
        or len(units[better].unique()) < len(better)
    ):
        raise BatchError("every unit_id must belong to two sequences, of which one is chosen")
    return better, worse


def on_sequences(batch: TensorDict, better: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values of pairs ``[P]`` on the chosen sequences, 0 on the others: ``[N]``."""
    return values.new_zeros(num_sequences(batch)).index_copy(0, better, values)


def on_both(batch: TensorDict, better: torch.Tensor, worse: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values of pairs ``[P]`` on both sequences ``[N]``: their mean over sequences is that over pairs."""
    return values.new_zeros(num_sequences(batch)).index_copy(0, better, values).index_copy(0, worse, values)


def mismatched(batch: TensorDict) -> TensorDict | None:
    """Each prompt with the completion of an earlier row that has another prompt; None where there is but one prompt.

    A prompt is what stands before the first trained token. The completion is that of the nearest row before, around the
    end of the batch where need be; rows without such a one are left out.
    """
    rows = unpack(batch)
    starts = [int(row["loss_mask"].to(torch.int8).argmax()) for row in rows]
    prompts = [tuple(row["input_ids"][:start].tolist()) for row, start in zip(rows, starts, strict=True)]
    made = []
    for i, prompt in enumerate(prompts):
        other = next((j % len(rows) for j in range(i - 1, i - len(rows), -1) if prompts[j % len(rows)] != prompt), None)
        if other is not None:
            own, taken = rows[i], rows[other]
            made.append(
                {
                    name: torch.cat([own[name][: starts[i]], taken[name][starts[other] :]])
                    for name in ("input_ids", "loss_mask")
                }
                | {"temperature": own["temperature"]}
            )
    return pack(made) if made else None
