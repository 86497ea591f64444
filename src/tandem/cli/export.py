"""Write the model of a run into a Hugging Face folder of its own, which has nothing of Tandem's.

RUN is the folder of a run, and its newest whole checkpoint is taken, or that of a step: RUN@120. `RUN@best` is the one
where the metric of `checkpoint.keep_best` is best. With --dtype the weights are rounded once, from the float32 masters.

examples:
  tandem export runs/addition/first models/adder
  tandem export runs/addition/first@40 models/adder --dtype float32
"""

import argparse
from pathlib import Path

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("run", metavar="RUN[@STEP]", help="the run's folder, and perhaps which of its checkpoints")
    parser.add_argument("target", metavar="DIR", type=Path, help="folder to make; it must not exist")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they were saved)")


def run(arguments: argparse.Namespace) -> int:
    """`tandem export`."""
    from tandem.state.export import checkpoint_of, export  # noqa: PLC0415 — imports torch

    name, _, step = arguments.run.rpartition("@") if "@" in Path(arguments.run).name else (arguments.run, "", "")
    checkpoint = checkpoint_of(Path(name).expanduser(), step or None)
    export(checkpoint, arguments.target.expanduser(), arguments.dtype)
    print(f"{arguments.target} has the model of {checkpoint}.")
    return 0
