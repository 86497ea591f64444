"""DeepSpeed's masters in the memory of the parameters that are computed with.

In float32 both are the same numbers in the same order, and a step copies the ones onto the others. DeepSpeed has them apart:
stages 1 and 2 always copy; stage 3 would not, but compares a device with the name of one, which is never equal.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

LOG = logging.getLogger("tandem.train")


def share(zero: Any, stage: int, rank: int, masters: Sequence[torch.Tensor]) -> bool:
    """True if masters are in the memory of the parameters from now on; where the two do not lie alike, all stays as it was,
    and that is logged. ``zero``: DeepSpeed's optimizer. ``masters``: this rank's part, one flat tensor a group."""
    try:
        difference = _difference(zero, stage, masters, _working(zero, stage, rank))
    except (AttributeError, RuntimeError) as error:  # another version, which has them somewhere else
        difference = f"they are not where they were ({error})"
    if difference is not None:
        LOG.warning(
            "DeepSpeed keeps float32 masters beside the float32 parameters, 4 bytes more for each number of a rank's part: "
            "in this version %s",
            difference,
        )
        return False
    lay(zero, stage, rank, masters)
    return True


def lay(zero: Any, stage: int, rank: int, masters: Sequence[torch.Tensor]) -> None:
    """Puts masters where the parameters are, which have the same numbers: at first, and when these were moved."""
    for master, working in zip(masters, _working(zero, stage, rank), strict=True):
        master.data = working
    if stage < 3:
        zero._link_all_hp_params()  # or what DeepSpeed knows as each parameter's master would be the old memory


def _working(zero: Any, stage: int, rank: int) -> list[torch.Tensor]:
    """This rank's part of the parameters, cut as the masters are, wherever they are at this time."""
    if stage == 3:
        return list(zero.lp_param_buffer.detach().split(zero.fp16_partitioned_groups_flat_numel))
    flats = zip(zero.bit16_groups_flat, zero.partition_size, strict=True)
    return [flat.detach().narrow(0, size * rank, size) for flat, size in flats]


def _difference(zero: Any, stage: int, masters: Sequence[torch.Tensor], working: Sequence[torch.Tensor]) -> str | None:
    """Between how masters and parameters lie; None if there is none."""
    if [_form(master) for master in masters] != [_form(piece) for piece in working]:
        return "they are cut in two ways"
    if not all(torch.equal(master, piece) for master, piece in zip(masters, working, strict=True)):
        return "they have other numbers"
    for group, (master, piece) in enumerate(zip(masters, working, strict=True)):
        for one, other in _pairs(zero, stage, group):
            if one.data_ptr() - master.data_ptr() != other.data_ptr() - piece.data_ptr() or one.numel() != other.numel():
                return "they are in two orders"
    return None


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()


def _pairs(zero: Any, stage: int, group: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """By parameter of a group: this rank's part of its master, and of itself."""
    if stage == 3:
        for parameter in zero.fp16_groups[group]:
            yield zero.get_local_fp32_param(parameter), parameter.ds_tensor
    else:
        found = (parameter._hp_mapping for parameter in zero.bit16_groups[group])
        yield from ((part.hp_fragment, part.lp_fragment) for part in found if part is not None)
