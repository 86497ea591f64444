"""A plan is made and drawn from the configuration alone: torch, which takes seconds to import, stays out."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BELOW = """
import contextlib, io, sys
from pathlib import Path
from tandem.config.algorithm import PRESETS
from tandem.cli.main import main
from tandem.config.load import KINDS

heavy = {"torch", "transformers", "tensordict", "numpy", "matplotlib"}

def graph(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(["graph", *arguments])
    assert not heavy & set(sys.modules), (arguments, heavy & set(sys.modules))
    return code, out.getvalue(), err.getvalue()

for name in PRESETS:
    code, out, err = graph("train_dataset.path=addition", "actor.path=smollm2-135m", f"algorithm={name}")
    assert code == 0 and "ppo_update" in out, (name, out, err)
for path in sorted(Path("examples").glob("*.yaml")):
    if not path.stem.endswith("_eval"):  # an evaluation trains nothing
        command = next((kind for kind in KINDS if graph(str(path), "--for", kind)[0] == 0), None)
        assert command is not None, path
"""


def test_planning_and_drawing_presets_and_examples_loads_no_torch():
    done = subprocess.run([sys.executable, "-c", BELOW], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
