"""Copy the model of a run into a Hugging Face folder that does not depend on Tandem.

RUN is a run; its newest intact checkpoint is taken. RUN@120 takes the checkpoint of step 120, RUN@best the one
with the best value of `checkpoint.keep_best`. With --dtype the weights are rounded once, from the float32 masters.

For a run with LoRA, the adapter is merged into the model; --no-merge writes only the adapter, in peft's format.

examples:
  tandem export runs/addition/grpo models/adder
  tandem export runs/addition/grpo@10 models/adder --dtype float32
  tandem export runs/addition/lora adapters/adder --no-merge
"""

import argparse
from pathlib import Path

from tandem.cli.arguments import run_at
from tandem.config.errors import ConfigError
from tandem.state.existing import step_of

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN[@STEP]", help="the run, and optionally a checkpoint: RUN@120 or RUN@best")
    parser.add_argument("target", metavar="DIR", type=Path, help="folder to create; it must not exist")
    parser.add_argument("--dtype", choices=DTYPES, help="precision of the weights (default: as saved)")
    parser.add_argument(
        "--merge",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="for a run with LoRA: write the whole model (default), or only the adapter",
    )


def run(arguments: argparse.Namespace) -> int:
    from tandem.models.adapter_folder import MergedWeights  # noqa: PLC0415 — imports torch
    from tandem.state.export import ADAPTER, checkpoint_of, export  # noqa: PLC0415 — imports torch

    place = Path(arguments.run).expanduser()
    checkpoint = checkpoint_of(place) if step_of(place) >= 0 else run_at(arguments.run).checkpoint
    adapts = (checkpoint / ADAPTER).is_dir()
    if arguments.merge is not None and not adapts:
        raise ConfigError(f"{checkpoint} has no adapter, so there is nothing to merge: leave --merge and --no-merge out")
    alone = arguments.merge is False
    if alone and arguments.dtype:
        raise ConfigError("--dtype is of a whole model; an adapter alone stays in float32: leave --dtype or --no-merge out")
    masters = (lambda folder: MergedWeights(folder / ADAPTER)) if adapts else None
    target = arguments.target.expanduser()
    export(checkpoint, target, arguments.dtype, part=ADAPTER if alone else ".", masters=masters)
    print(f"{arguments.target} has the {'adapter' if alone else 'model'} of {checkpoint}.")
    return 0
