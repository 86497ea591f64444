"""The one file that imports DeepSpeed: quietly, with what it changes in a process put back, and its configuration."""

import contextlib
import importlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tandem.api.failures import ConfigError
from tandem.config.extras import install_extra

_BUCKET = 50_000_000
"""Most elements of gradients, or of parameters, that are sent at a time."""


def settings_of(stage: int, dtype: torch.dtype, total: int) -> dict[str, Any]:
    """DeepSpeed's configuration. ``total``: elements of all parameters."""
    bucket = min(total, _BUCKET) // 2 * 2 + 2
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": False,
        "memory_efficient_linear": False,  # or torch.nn.functional.linear is replaced for the whole process
    }
    if stage == 3:
        # no small parameters stay whole, and none is kept for the backward pass
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    else:
        zero |= {"compute_grad_norm": False}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": zero,
    }


def import_deepspeed(device: torch.device) -> Any:
    """The library, quietly.

    Raises:
        ConfigError: it is not there.
    """
    with quiet(device):
        try:
            deepspeed = importlib.import_module("deepspeed")
        except ImportError as error:
            raise ConfigError(
                f"actor.backend=deepspeed needs DeepSpeed ({error}): {install_extra('deepspeed')} --no-build-isolation, "
                "and where there is no GPU DS_ACCELERATOR=cpu before it"
            ) from error
    kind = deepspeed.accelerator.get_accelerator().device_name()
    if kind != device.type:  # some other library has imported it
        raise ConfigError(
            f"DeepSpeed computes on {kind!r} in this process, not on {device.type!r}: set "
            f"DS_ACCELERATOR={device.type} in the environment of the command"
        )
    if device.type == "cpu":
        # it would compile an operation for ranks on one machine, at the first start and for each user
        deepspeed.ops.__compatible_ops__ = {}
    # it calls, a thousand times a step, what newer versions of torch have under another name
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    log = logging.getLogger("DeepSpeed")  # it writes to stdout, where `--json` has its one object
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.ERROR)
    return deepspeed


@contextlib.contextmanager
def quiet(device: torch.device) -> Iterator[None]:
    """A block that prints nothing, warns of nothing, and finds the variables that DeepSpeed wants; none of them stays."""
    before = dict(os.environ)
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        with local_rank(device), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def local_rank(device: torch.device) -> Iterator[None]:
    """A block with the variable by which DeepSpeed finds its device, also in a process that no launcher started."""
    if "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]
