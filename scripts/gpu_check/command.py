"""One command on a machine with a GPU: do the equalities hold there, how fast is it, does it learn? Writes a page.

    python -m scripts.gpu_check                        # from the repository's root; writes docs/gpu_results.md
    python -m scripts.gpu_check --model FOLDER         # another model than smollm2-135m
    python -m scripts.gpu_check --only placement learns
    python -m scripts.gpu_check --vllm-python envs/vllm/bin/python    # generation beside vLLM's
    python -m scripts.gpu_check --device cpu --quick   # every part at a small size, in a minute, on any machine

Placement comes first, then equalities, then figures. The page is written again after each check, so a run that is cut off
keeps what it has; after `--minutes` (20) the check that runs is cut off, and the page names it and all that did not run.

What must be installed is in needs.py: tensordict beside torch and transformers; neither datasets nor math-verify. The exit
status is the number of checks that failed, at most 100. What only a CUDA device runs is named in cuda_only.py.
"""

import argparse
import importlib.util
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from scripts.gpu_check import channels, cuda_only, equalities, placement, runs, speeds
from scripts.gpu_check.place import Findings, OutOfTime, Place
from scripts.gpu_check.report import page
from tandem.api.plugins import own_alarm
from tandem.models.catalog import resolve
from tests.tiny import tiny_model_folder

CHECKS = {
    "placement": (placement.each_on_its_own, placement.ranks_meet),
    "equalities": (
        equalities.engine_is_transformers,
        equalities.recorded_is_unrecorded,
        equalities.packed_is_padded,
        equalities.shared_is_alone,
        equalities.options_are_plain,
        equalities.adapters_are_merged,
        equalities.delivered_is_trained,
        channels.handles_are_opened,
        runs.resumed_is_uninterrupted,
    ),
    "speeds": (speeds.training, speeds.generation, speeds.recorded_steps, speeds.beside_vllm, speeds.updates, speeds.memory),
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
    parser.add_argument("--minutes", type=float, default=20.0, help="time of all checks together (default: 20)")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM (default: this one, if vLLM is in it)")
    parser.add_argument("--out", type=Path, help=f"the page (default: docs/{RESULTS.name})")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        print("no GPU: what only a GPU runs is not checked")
    out = arguments.out or (None if arguments.quick else RESULTS)
    vllm_python = arguments.vllm_python or (sys.executable if importlib.util.find_spec("vllm") else None)
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-check-") as folder:
        scratch = Path(folder)
        model = tiny_model_folder(scratch) if arguments.quick else resolve(arguments.model)
        place = Place(arguments.device, model, scratch, arguments.quick, vllm_python)
        findings = run_all(
            place,
            [name for name in names if name in arguments.only],
            out,
            "a tiny random model" if arguments.quick else arguments.model,
            arguments.minutes * 60,
        )
    if out is not None:
        print(f"Written: {out}")
    print(f"{findings.failed} failed" + (f"; no time for {', '.join(findings.not_run)}" if findings.not_run else ""))
    return min(findings.failed, 100)


def run_all(place: Place, only: list[str], out: Path | None, model: str, seconds: float) -> Findings:
    """Runs the checks of these names and sections in order, for so many seconds; writes the page after each."""
    chosen = [
        (section, check) for section, checks in CHECKS.items() for check in checks if {section, check.__name__} & {*only}
    ]
    findings, end = Findings(), time.monotonic() + seconds
    with own_alarm(_out_of_time):
        for number, (section, check) in enumerate(chosen):
            left = end - time.monotonic()
            if left <= 0:
                findings.not_run.append(check.__name__)
            else:
                signal.setitimer(signal.ITIMER_REAL, left)
                findings.run(section, check, place)
                signal.setitimer(signal.ITIMER_REAL, 0)
            if out is not None:
                to_come = [later.__name__ for _, later in chosen[number + 1 :]]
                out.write_text(page(findings, place, model, to_come), encoding="utf-8")
    return findings


def _out_of_time(*_: object) -> NoReturn:
    raise OutOfTime
