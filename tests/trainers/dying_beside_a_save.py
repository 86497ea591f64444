"""A rank of a real run: rank 0 writes its second checkpoint slowly beside training, and rank 1 dies meanwhile."""

import atexit
import itertools
import os
import sys
import time
from pathlib import Path

from tandem.cli.main import main
from tandem.engines.train.optimizer import Optimizer
from tandem.state import checkpoint
from tests.trainers.killing import die


def run(rank: int, folder: Path, seconds: float, arguments: list[str]) -> int:
    """``folder``: of the run; ``seconds``: what the manifest of step 2 takes. When rank 1 died stands in
    ``folder``/died; rank 0 leaves ``folder``/left when it ends by itself."""
    write, step, steps = checkpoint.write_manifest, Optimizer.step, itertools.count(1)

    def slow(temporary, run, number, metrics):
        if number == 2:
            (folder / "slow").touch()
            time.sleep(seconds)
        write(temporary, run, number, metrics)

    def dying(self, *arguments, **named):
        if next(steps) == 3:  # the save of step 2 has begun, and that of step 3 would wait for it
            deadline = time.monotonic() + 60
            while not (folder / "slow").exists():
                assert time.monotonic() < deadline, "the save of step 2 did not begin"
                time.sleep(0.01)
            (folder / "died").write_text(str(time.time()))
            die()
        return step(self, *arguments, **named)

    if rank == 0:
        atexit.register(lambda: (folder / "left").touch())
        checkpoint.write_manifest = slow
    else:
        Optimizer.step = dying
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run(int(os.environ["RANK"]), Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
