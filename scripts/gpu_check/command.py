"""One command on a machine with a GPU: what is known of it after five minutes, and does what tests say hold there?

    python -m scripts.gpu_check --plan                      # what is checked, in which order, with which limits
    python -m scripts.gpu_check --out FOLDER --wheels WHEELS     # from the repository's root
    python -m scripts.gpu_check --only decode updates
    python -m scripts.gpu_check --vllm-python envs/vllm/bin/python    # decoding beside vLLM's
    python -m scripts.gpu_check --device cpu --quick        # every part at a small size, on any machine

It needs one GPU and no network: the models are made here, with random weights. What must be installed is in needs.py;
packages that are missing are taken from `--wheels`. Each check is a process of its own, which is killed at its limit, also
where a kernel hangs; the next one goes on. Lines are in `results.jsonl` of `--out` as soon as they are known, the page
`results.md` is written again after each check, and profiles lie beside it. The exit status is the number of lines that are
not as they must be and of checks that were killed or died, at most 100. What only a CUDA device runs is in cuda_only.py.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.gpu_check.needs import add_to_path, missing, unpack
from scripts.gpu_check.report import Check, page, plan

ROOT = Path(__file__).resolve().parents[2]
CHECKS = (
    Check(".environment.versions", "versions, capability, attention kernels, NCCL, free memory", 10, 60),
    Check(".equalities.engine_is_transformers", "the engine's log-probabilities are transformers'", 8, 60),
    Check(".equalities.packed_is_padded", "packed training is training one by one", 8, 60),
    Check(".equalities.shared_is_alone", "prompts shared by samples change nothing", 8, 60),
    Check(".equalities.delivered_is_trained", "after an update the engine has the trainer's weights", 15, 90),
    Check(".channels.handles_are_opened", "another process opens weights by handles", 12, 60),
    Check(".runs.repeats", "two runs with deterministic=true", 15, 90),
    Check(".speeds.memory_is_handed_back", "a second process gets the memory that training held", 35, 90),
    Check(".speeds.training_short", "1.5B, a step of 4 x 5k tokens: profile, peak, MFU", 30, 90),
    Check(".speeds.training_long", "the same with 4 x 16k tokens, checkpointed", 40, 90),
    Check(".speeds.decode", "1.5B, 128 rows at 0.3k, 1.5k and 4.2k tokens: time of a step, and its error", 90, 150),
    Check(".equalities.options_are_plain", "FSDP alone with offload, and compiled layers, change nothing", 30, 90),
    Check(".speeds.training_compiled", "1.5B, 4 x 5k tokens, compiled", 60, 120),
    Check(".speeds.updates", "1.5B, the pause of an update while requests run", 40, 90),
    Check(".runs.resumed_is_uninterrupted", "a resumed run is an uninterrupted one", 25, 90),
    Check(".placement.each_on_its_own", "servers see their own GPUs", 15, 60),
    Check(".placement.ranks_meet", "ranks on all GPUs add up a number", 20, 60),
    Check(".speeds.beside_vllm", "the same decoding by vLLM", 90, 300),
)
"""In the order in which they run. The times of each were estimated, not measured: no GPU has run them."""


def main(words: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """Runs all checks; prints them as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    there = any(Path("/dev").glob("nvidia[0-9]*"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if there else "cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes and models, as always on a CPU")
    names = [check.name for check in checks]
    parser.add_argument("--only", choices=names, nargs="+", default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=9.0, help="time of all checks together (default: 9)")
    parser.add_argument("--plan", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels of packages that are not installed here")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM (default: this one, if vLLM is in it)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=ROOT / "runs/gpu_check", help="for all results")
    arguments = parser.parse_args(words)
    chosen = [check for check in checks if check.name in arguments.only]
    if arguments.plan:
        print(plan(chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-check-") as folder:
        scratch = Path(folder)
        add_to_path(ROOT / "src")
        if arguments.wheels is not None:
            unpack(arguments.wheels, scratch / "wheels")
        if absent := missing():
            sys.exit(f"error: not installed here: {', '.join(absent)}; install them, or give the folder of their --wheels")
        vllm_python = arguments.vllm_python or (sys.executable if importlib.util.find_spec("vllm") else None)
        quick = arguments.quick or arguments.device == "cpu"
        place = (arguments.device, scratch, arguments.out.resolve(), quick, vllm_python)
        return run_all(chosen, place, arguments.minutes * 60)


def run_all(checks: Sequence[Check], place: tuple[Any, ...], seconds: float) -> int:
    """Runs the checks one after another, for so many seconds; writes the page after each. Returns how much failed."""
    *_, out, _, _ = place
    out.mkdir(parents=True, exist_ok=True)
    results, end = out / "results.jsonl", time.monotonic() + seconds
    results.write_text("")
    # modules are imported once, by a process that never asks CUDA for anything, so that its children may
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tandem", *sorted({check.module for check in checks})])  # tandem before torch
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for check in checks:
        began = time.monotonic()
        limit = min(end - began, check.limit_s)
        if limit > 0:
            process = context.Process(target=run_one, args=(check, place))
            process.start()
            try:
                process.join(limit)
                status = process.exitcode
            finally:  # and all that it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join(5)  # its memory is free for the next
            late = f"killed after {limit:.0f} s" if limit == check.limit_s else "cut off: the time of all checks was over"
            ended = {0: "done", None: late}.get(status, f"died with status {status}")
            write(results, check, ended=ended, seconds=round(time.monotonic() - began, 1))
        rows = [json.loads(line) for line in results.read_text().splitlines()]
        (out / "results.md").write_text(page(rows, checks), encoding="utf-8")
    failed = sum(row.get("good") is False or row.get("ended", "done").startswith(("killed", "died")) for row in rows)
    left = len(checks) - sum(row.get("ended", "").startswith(("done", "killed", "died")) for row in rows)
    print(f"Written: {out / 'results.md'}\n{failed} failed")
    if left:
        print(f"{left} not run to their end: give more --minutes")
    return min(failed, 100)


def run_one(check: Check, place: tuple[Any, ...]) -> None:
    """The process of a check. One that raises is a line that failed."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    *_, out, _, _ = place
    try:
        module = importlib.import_module(check.module)
        for line in getattr(module, check.name)(module.Place(*place)):
            write(out / "results.jsonl", check, **vars(line))
    except Exception as error:  # boundary: the other checks must run
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        write(out / "results.jsonl", check, what="the check", found=found, limit="to end", good=False)


def _end_with_parent() -> None:
    """Ends this process and all that it started as soon as nobody waits for it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def write(results: Path, check: Check, **row: Any) -> None:
    """Adds a line to the results, and prints it."""
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"check": check.name} | row) + "\n")
    if "seconds" in row:
        print(f"     {check.name}: {row['ended']}, {row['seconds']} s", flush=True)
    else:
        mark = {True: "ok  ", False: "FAIL", None: "    "}[row["good"]]
        limit = f" ({row['limit']})" if row["limit"] else ""
        print(f"{mark} {row['what']}: {row['found']}{limit}", flush=True)
