"""Tries every cell of a matrix of tests/matrix on a tiny model and writes its page, a few minutes on two cores.

PYTHONPATH=. python scripts/matrix.py algorithms            # writes docs/matrix.md
PYTHONPATH=. python scripts/matrix.py backends              # writes docs/matrix_of_backends.md
PYTHONPATH=. python scripts/matrix.py media                 # writes docs/matrix_of_media.md
PYTHONPATH=. python scripts/matrix.py backends --keep       # and the list of cells that must run from now on
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.matrix import backend_cells, cells, media_cells  # noqa: E402
from tests.matrix.workers import results  # noqa: E402
from tests.tiny import tiny_model_folder  # noqa: E402

ALGORITHMS = """# What goes together

<!-- Made by `python scripts/matrix.py`; a slow test runs every line of it again. -->

Algorithm × synchronous, asynchronous or with replay × colocated or decoupled × a critic, a reference or neither beside the
actor × one or two ranks: each pair of choices occurs in some line, and each line was tried with two steps on a tiny model.
It *runs*, which means finite losses, a gradient, and every prompt counted; or it is refused before anything starts, with the
reason. Cells that must run are kept in `tests/matrix/must_run.txt`. A critic means `algorithm.advantage=gae`, a reference
`algorithm.kl.coefficient=0.01`.
"""

BACKENDS = """# Which backend does what

<!-- Made by `python scripts/matrix.py backends`; a slow test runs every cell of it again. -->

How the model is spread ([parallelism.md](parallelism.md)) × what it learns × one option more: each two choices that do not
contradict each other were tried together in a run of two steps of a tiny model, on a CPU. A preset in a field *ran*: finite
figures, weights that moved (a critic's too), a whole checkpoint, and what the option promises. The preset in a field changes
from one to the next, so that each meets each backend and each option; no field says that others do not run. Cells that must
run are kept in `tests/matrix/backends_must_run.txt`; algorithms × ways of training are in [matrix.md](matrix.md).

`lora` is `actor.lora.rank=4`, `checkpointing` `actor.gradient_checkpointing`, `selective` `actor.selective_checkpointing`
with it, `compile` and `offload` are keys of `actor` too, `asynchronous` is `async_training`, and `saves` a checkpoint to go
on from after each step, written beside training. The preset `reward` is `tandem reward`, `dpo`
`tandem preference`, `sft` `tandem sft`.
"""

MEDIA = """# What learns with which model that sees or hears

<!-- Made by `python scripts/matrix.py media`; a slow test runs a line of each kind again. -->

Each field was a run of a tiny model of this family ([media_models.md](media_models.md)), on rows with one picture or sound,
with several, with the same one twice, and with none. It *runs*, which means finite figures, a gradient, weights that moved
(those of what sees or hears too, unless it was frozen), and, where it generates, log-probabilities of the engine that are
the trainer's to 0.001. A dash: not tried yet. What goes with what for text: [matrix.md](matrix.md).

All of them generated in the embedded engine. With vLLM's real server, Idefics3, Qwen2.5-VL and Qwen2-Audio were tried, the
others not; SGLang's real server was tried with none ([servers.md](servers.md#images-and-sounds)).
"""


class Matrix(NamedTuple):
    """A module of cells and the page that shows it."""

    module: Any
    page: str
    must_run: str
    head: str
    table: Callable[[Any], str]

    def text(self, found: dict[Any, str]) -> str:
        """The text of the page."""
        ran = sum(result == cells.RAN for result in found.values())
        what = "lines" if self.module is cells else "cells"
        return f"{self.head}\n{ran} of {len(found)} {what} run.\n\n{self.table(found)}\n"


MATRICES = {
    "algorithms": Matrix(cells, "docs/matrix.md", "must_run.txt", ALGORITHMS, cells.table),
    "backends": Matrix(backend_cells, "docs/matrix_of_backends.md", "backends_must_run.txt", BACKENDS, backend_cells.table),
    "media": Matrix(media_cells, "docs/matrix_of_media.md", "", MEDIA, media_cells.table),
}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("matrix", choices=MATRICES, nargs="?", default="algorithms")
    parser.add_argument("--keep", action="store_true", help="write the list of cells that must run, too")
    options = parser.parse_args()
    matrix = MATRICES[options.matrix]
    with tempfile.TemporaryDirectory() as folder:
        found = results(matrix.module.__name__, tiny_model_folder(Path(folder), "llama"), Path(folder))
    (ROOT / matrix.page).write_text(matrix.text(found))
    if options.keep and matrix.must_run:
        kept = "".join(f"{cell}\n" for cell, result in found.items() if result == cells.RAN)
        (cells.HERE / matrix.must_run).write_text(kept)


if __name__ == "__main__":
    main()
