"""Tries every cell of the matrix of tests/matrix on a tiny model and writes docs/matrix.md, a few minutes on two cores.

PYTHONPATH=. python scripts/matrix.py            # writes the page
PYTHONPATH=. python scripts/matrix.py --keep     # and the list of cells that must run from now on
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.matrix.cells import HERE, RAN, Cell, table  # noqa: E402
from tests.matrix.workers import results  # noqa: E402
from tests.tiny import tiny_model_folder  # noqa: E402

HEAD = """# What goes together

<!-- Made by `python scripts/matrix.py`; a slow test runs every line of it again. -->

Algorithm × synchronous, asynchronous or with replay × colocated or decoupled × a critic, a reference or neither beside the
actor × one or two ranks: each pair of choices occurs in some line, and each line was tried with two steps on a tiny model.
It *runs*, which means finite losses, a gradient, and every prompt counted; or it is refused before anything starts, with the
reason. Cells that must run are kept in `tests/matrix/must_run.txt`. A critic means `algorithm.advantage=gae`, a reference
`algorithm.kl.coefficient=0.01`.
"""


def page(found: dict[Cell, str]) -> str:
    """The text of docs/matrix.md."""
    ran = sum(result == RAN for result in found.values())
    return f"{HEAD}\n{ran} of {len(found)} lines run.\n\n{table(found)}\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = results(tiny_model_folder(Path(folder), "llama"), Path(folder))
    (ROOT / "docs/matrix.md").write_text(page(found))
    if "--keep" in sys.argv:
        (HERE / "must_run.txt").write_text("".join(f"{cell}\n" for cell, result in found.items() if result == RAN))


if __name__ == "__main__":
    main()
