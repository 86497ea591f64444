"""One command on a machine with a GPU: do the equalities hold there, how fast is it, does it learn? Writes a page.

    python -m scripts.gpu_check                        # from the repository's root; writes docs/gpu_results.md
    python -m scripts.gpu_check --model FOLDER         # another model than smollm2-135m
    python -m scripts.gpu_check --device cpu --quick   # every part at a small size, in a minute, on any machine

What must be installed is in needs.py: tensordict beside torch and transformers; neither datasets nor math-verify. The exit
status is the number of checks that failed, at most 100. What only a CUDA device runs is named in cuda_only.py.
"""

import argparse
import tempfile
from pathlib import Path

from scripts.gpu_check import cuda_only, equalities, runs, speeds
from scripts.gpu_check.place import Findings, Place
from scripts.gpu_check.report import page
from tandem.models.catalog import resolve
from tests.tiny import tiny_model_folder

CHECKS = {
    "equalities": (
        equalities.engine_is_transformers,
        equalities.packed_is_padded,
        equalities.shared_is_alone,
        equalities.options_are_plain,
        equalities.adapters_are_merged,
        equalities.delivered_is_trained,
        runs.resumed_is_uninterrupted,
    ),
    "speeds": (speeds.training, speeds.generation, speeds.updates),
    "learning": (runs.learns, runs.repeats),
}
RESULTS = Path(__file__).resolve().parents[2] / "docs/gpu_results.md"


def main() -> int:
    """Runs all checks; prints them as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=cuda_only.default_device())
    parser.add_argument("--quick", action="store_true", help="small sizes, a tiny random model, and no page unless --out")
    parser.add_argument("--model", default="smollm2-135m", help="a folder, or a name that Tandem knows")
    names = [*CHECKS, *(check.__name__ for checks in CHECKS.values() for check in checks)]
    parser.add_argument("--only", choices=names, nargs="*", default=list(CHECKS), metavar="NAME", help=", ".join(names))
    parser.add_argument("--out", type=Path, help=f"the page (default: docs/{RESULTS.name})")
    arguments = parser.parse_args()
    cuda_only.prepare()
    if arguments.device == "cpu":
        print("no GPU: what only a GPU runs is not checked")
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-check-") as folder:
        scratch = Path(folder)
        model = tiny_model_folder(scratch) if arguments.quick else resolve(arguments.model)
        place, findings = Place(arguments.device, model, scratch, arguments.quick), Findings()
        for section, checks in CHECKS.items():
            for check in checks:
                if {section, check.__name__} & set(arguments.only):
                    findings.run(section, check, place)
        text = page(findings, place, "a tiny random model" if arguments.quick else arguments.model)
    out = arguments.out or (None if arguments.quick else RESULTS)
    if out is not None:
        out.write_text(text, encoding="utf-8")
        print(f"Written: {out}")
    print(f"{findings.failed} failed")
    return min(findings.failed, 100)
