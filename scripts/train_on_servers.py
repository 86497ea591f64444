"""One script on every kind of engine: `examples/gsm8k_grpo.py`, three asynchronous steps each, and what must be true after.

    python scripts/train_on_servers.py --model FOLDER --vllm VLLM_ENV/bin/python --sglang SGLANG_ENV/bin/python
    python scripts/train_on_servers.py … --backends vllm:d1+sglang:d1 --kill vllm     # kill -9 to one of them on the way
    python scripts/train_on_servers.py … --backends vllm:d1 --restart               # kill -9 to rank 0; its server goes on
    python scripts/train_on_servers.py … --backends vllm:d1 --workflow tools --set workflow_args.tools=calculator

Backends: embedded, and with an interpreter for it vllm:d1, sglang:d1, and the mixed fleet vllm:d1+tandem:d1; or those of
``--backends``. ``--workflow``: any that the configuration takes, as ``tools`` or ``my_agent.py:agent``. ``--data`` is a
folder with GSM8K's train.jsonl (the few rows that are kept for the tests suffice); further ``key=value`` go to each run.
Says what a run is doing every 15 s, ends one that passes ``--deadline-s``, prints one line a check and a table last; the
exit status is the number of checks that failed. docs/servers_measured.md has its output.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from killed_rank import SETTINGS as RESTART_SETTINGS
from killed_rank import KilledRank

from tandem.api.weights import FolderSource, tensor_digest, version_digest
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.models.catalog import resolve

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "gsm8k_grpo.py"
CONFIG = SCRIPT.with_suffix(".yaml")
"""The same run by `tandem train`, which starts ranks again."""

STEPS = 3
ETA = 1
"""With 2 a quick engine could answer all three steps' prompts before the first update, and none would show new weights."""

MARK = "TANDEM_TRAIN_ON_SERVERS"
"""A variable in the environment of the run and of all that it starts: by it what was left behind is found."""

SETTINGS = (
    "async_training=true",
    f"rollout.max_head_offpolicyness={ETA}",
    f"total_train_steps={STEPS}",
    "rollout.max_concurrent=4",  # the example's 1 would keep one of two servers idle
    "rollout.verify.every_steps=1",
    "rollout.dtype=float32",
    "actor.dtype=float32",
    "gconfig.max_new_tokens=48",
    "tracking.trajectories_per_step=1000",
)

COMMAND = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server", "tandem": "serve"}
"""Kind → a word of the command line of its servers, by which --kill finds one."""

TELL_S, LOOK_S = 15.0, 0.5
RESTART_LOOK_S = 0.05
"""A tiny model may make all its steps within the other one."""

ENDING_S = 90.0
"""Seconds that a run may take to end its servers once it is told to end."""

GONE_S = 10.0
"""Seconds that its processes may take to vanish after a run."""


@dataclass
class Report:
    """The findings about one backend."""

    backend: str
    seconds: float = 0.0
    failed: int = 0
    killed: str | None = None
    """The kind of server that was killed on the way."""

    rank: KilledRank | None = None
    """With --restart."""

    cells: dict[str, str] = field(default_factory=dict)
    """The cells of its row in the table."""

    def line(self, good: bool, what: str) -> None:
        """One check."""
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {self.backend}: {what}", flush=True)


def main() -> int:
    """Entry point."""
    options = parse()
    reports = []
    with tempfile.TemporaryDirectory(prefix="train-on-servers-") as place:
        for number, backend in enumerate(backends(options)):
            report = Report(backend)
            reports.append(report)
            root = Path(options.keep or place).absolute() / f"{number}-{backend.replace(':', '-').replace('+', '-and-')}"
            try:
                status, left = train(backend, options, root, report)
                check(report, root, status, left, options)
            except Exception as error:  # the worker boundary: one backend's failure is no reason not to try the next
                traceback.print_exc()
                report.line(False, f"{type(error).__name__}: {error}")
    print(f"\n{table(reports)}\n")
    failed = sum(report.failed for report in reports)
    print(f"{failed} checks failed", flush=True)
    return failed


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="model folder or name (default: smollm2-135m)")
    parser.add_argument("--data", type=Path, default=ROOT / "tests" / "data_files" / "gsm8k", help="folder with train.jsonl")
    parser.add_argument("--vllm", metavar="PYTHON", help="python of the environment that has vLLM")
    parser.add_argument("--sglang", metavar="PYTHON", help="python of the environment that has SGLang")
    parser.add_argument("--backends", nargs="+", metavar="BACKEND", help="these instead, as rollout.backend takes them")
    faults = parser.add_mutually_exclusive_group()
    faults.add_argument("--kill", choices=COMMAND, help="kill -9 to a server of this kind after the first step")
    faults.add_argument(
        "--restart", action="store_true", help="kill -9 to rank 0 after the first step; its servers are kept"
    )
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="longest time of one run (default: 3600)")
    parser.add_argument("--startup-timeout-s", type=float, default=1200.0, help="longest start of a server (default: 1200)")
    parser.add_argument("--workflow", metavar="NAME", help="workflow of each run (default: one answer to a prompt)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run folders and logs there")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of each run")
    options = parser.parse_args()
    if not backends(options):
        parser.error("--restart needs a server: give --vllm, --sglang, or --backends tandem:d1")
    if options.restart and any("embedded" in backend for backend in options.backends or ()):
        parser.error("--restart is for servers that outlive a rank; an embedded engine is a part of it")
    return options


def backends(options: argparse.Namespace) -> list[str]:
    """The checks, in order."""
    if options.backends:
        return list(options.backends)
    found = [] if options.restart else ["embedded"]
    found += ["vllm:d1"] if options.vllm else []
    found += ["sglang:d1"] if options.sglang else []
    return found + (["vllm:d1+tandem:d1"] if options.vllm and not options.restart else [])


def settings(backend: str, options: argparse.Namespace, root: Path) -> list[str]:
    """The command line of one run."""
    items = [f"run.root={root}", f"actor.path={options.model}", f"train_dataset.path={options.data}", *SETTINGS]
    items.append(f"rollout.backend={backend}")
    if backend != "embedded":
        items.append(f"rollout.fleet.startup_timeout_s={options.startup_timeout_s:g}")
    for kind, python in (("vllm", options.vllm), ("sglang", options.sglang)):
        if f"{kind}:" in backend and python:
            items.append(f"rollout.fleet.{kind}_python={python}")
    if options.workflow:  # which says itself what the model is to do
        items += [f"workflow={options.workflow}", "system_prompt=null"]
    return [*items, *(RESTART_SETTINGS if options.restart else ()), *options.set]


# ------------------------------------------------------------------ one run


def train(backend: str, options: argparse.Namespace, root: Path, report: Report) -> tuple[int | None, list[str]]:
    """Runs the example; gives its exit status (None: it had to be ended) and the processes that it left, in words."""
    root.mkdir(parents=True)
    mark, began = uuid.uuid4().hex, time.monotonic()
    print(f"     {backend}: begins, at most {options.deadline_s:g} s; its output is {root / 'output.txt'}", flush=True)
    command = ["-m", "tandem", "train", str(CONFIG)] if options.restart else [str(SCRIPT)]
    with (root / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command, *settings(backend, options, root)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {MARK: mark},
            start_new_session=True,  # Ctrl-C ends it through `end`, once
        )
    try:
        status = follow(process, report, root, began, options, mark)
    finally:
        end(process)
        left = leftover(mark)
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
    report.seconds = time.monotonic() - began
    return status, [describe(one) for one in left]


def follow(
    process: subprocess.Popen[bytes], report: Report, root: Path, began: float, options: argparse.Namespace, mark: str
) -> int | None:
    """Waits for the end and tells how far it is; None where the deadline came first."""
    told = began
    while process.poll() is None:
        now = time.monotonic()
        if now - began > options.deadline_s:
            return None
        if options.kill and not report.killed and rows_of(root):
            kill(options.kill, mark, report)
        if options.restart and report.rank is None:
            report.rank = KilledRank.kill(process, root, rows_of(root))
        elif report.rank is not None:
            report.rank.look(rows_of(root))
        if now - told >= TELL_S:
            told = now
            far = f"{now - began:.0f} s: {len(rows_of(root))} of {STEPS} steps"
            said = [last_line(file) for file in (*root.glob("*/*/log.txt"), root / "output.txt")]
            print(f"     {report.backend}, {far}; {next(filter(None, said), 'it has said nothing yet')[-110:]}", flush=True)
        time.sleep(RESTART_LOOK_S if options.restart else LOOK_S)
    return process.returncode


def kill(kind: str, mark: str, report: Report) -> None:
    """kill -9 to the first process of a server of this kind."""
    words = {}
    for one in marked(mark):
        with contextlib.suppress(psutil.Error):  # gone since
            words[one] = one.cmdline()
    found = [one for one, said in words.items() if COMMAND[kind] in said and not any("keeper.py" in word for word in said)]
    for one in found[:1]:
        report.killed = kind
        print(f"     {report.backend}: kill -9 to {describe(one)}", flush=True)
        one.kill()


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a run that still goes on: kindly, so that it ends its servers, then not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
    if process.poll() is None:
        process.kill()
        process.wait()


def leftover(mark: str) -> list[psutil.Process]:
    """Processes that the run started and that are still there, a while after its end."""
    until = time.monotonic() + GONE_S
    while (found := list(marked(mark))) and time.monotonic() < until:
        time.sleep(LOOK_S)
    return found


def marked(mark: str) -> Iterator[psutil.Process]:
    """Living processes with this mark in their environment."""
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.status() != psutil.STATUS_ZOMBIE and one.environ().get(MARK) == mark:
                yield one


def describe(one: psutil.Process) -> str:
    """A process in words."""
    with contextlib.suppress(psutil.Error):
        return f"{one.pid} ({' '.join(one.cmdline())[:80]})"
    return str(one.pid)


# ------------------------------------------------------------------ what must be true after it


def check(report: Report, root: Path, status: int | None, left: list[str], options: argparse.Namespace) -> None:
    """All checks of one run."""
    rows = rows_of(root)
    ended = "its deadline passed" if status is None else f"exit status {status}"
    report.line(status == 0 and [row["step"] for row in rows] == list(range(1, STEPS + 1)), f"{len(rows)} steps, {ended}")
    left += [str(place) for place in root.glob(".weights")]
    report.line(not left, f"left behind: {', '.join(left) or 'no process and no weights'}")
    if status != 0 or not rows:
        print((root / "output.txt").read_text(errors="replace")[-4000:], flush=True)
        return
    folder = run_folder(root)
    ages = max(row["staleness/max"] for row in rows)
    report.line(ages <= ETA, f"no trained token is older than {ages:.0f} versions, of at most {ETA}")
    check_proof(report, rows)
    check_weights(report, folder, resolve(options.model))
    check_ledger(report, folder, rows)
    check_servers(report, folder, rows[-1])
    if report.rank is not None:
        report.rank.report(folder, report.line)
    elif options.restart:
        report.line(False, "the run had ended before rank 0 could be killed")
    if options.kill:
        report.line(report.killed is not None, f"a {options.kill} server was killed on the way")
    report.cells |= {"seconds": f"{report.seconds:.0f}", "steps": str(len(rows)), "staleness": f"{ages:.0f}"}
    report.cells["left"] = str(len(left))


def check_proof(report: Report, rows: list[dict[str, Any]]) -> None:
    """The trainer scored tokens of each step again under the weights that they are stamped with."""
    shares = [row.get("gap/verified") or 0.0 for row in rows]
    gaps = [row.get("gap/numeric") for row in rows]
    good = min(shares) > 0 and all(gap is not None for gap in gaps)
    worst = max((gap for gap in gaps if gap is not None), default=float("nan"))
    report.line(good, f"proof of delivery: {min(shares):.0%} or more of each batch scored again, {worst:.1e} nats apart")
    report.cells |= {"verified": f"{sum(shares) / len(shares):.0%}", "gap": f"{worst:.1e}"}


def check_weights(report: Report, folder: Path, model: Path) -> None:
    """Each version has weights of its own, and the last ones are not the first."""
    stamps: dict[int, set[str]] = {}
    for sample in samples_of(folder):
        for parts in sample["versions"]:
            for part in parts:
                stamps.setdefault(part["version"], set()).add(part.get("digest", ""))
    digests = set().union(*stamps.values())
    good = all(len(found) == 1 for found in stamps.values()) and len(digests) == len(stamps) and "" not in digests
    report.line(good and len(stamps) > 1, f"tokens of versions {sorted(stamps)}, each with one digest, all different")
    before, after = digests_of(model), digests_of(folder / "checkpoints" / f"step_{STEPS}")
    shared = before.keys() & after.keys()  # one of them may name a tied output layer, too
    first, last = (version_digest({name: found[name] for name in shared}) for found in (before, after))
    changed = sum(before[name] != after[name] for name in shared)
    report.line(changed > 0, f"weights: {first[:12]} before, {last[:12]} after, {changed} of {len(shared)} tensors changed")
    report.cells |= {"before": first[:8], "after": last[:8]}


def check_ledger(report: Report, folder: Path, rows: list[dict[str, Any]]) -> None:
    """Each prompt was trained once, with all of its samples, and none was lost."""
    config = load_config(TrainConfig, folder / "config.yaml").config
    wanted, last = STEPS * config.rollout.batch_size, rows[-1]
    times = Counter(sample["group"] for sample in samples_of(folder))
    whole = len(times) == wanted and set(times.values()) == {config.gconfig.n_samples}
    dropped = {name: last[name] for name in last if name.startswith("episodes/dropped")}
    report.line(
        whole and last["episodes/trained"] == wanted and not dropped,
        f"ledger: {last['episodes/trained']:.0f} prompts trained of {wanted}, each once; dropped: {dropped or 'none'}",
    )


def check_servers(report: Report, folder: Path, last: dict[str, Any]) -> None:
    """Every server of a fleet served, and none was given up but the one that was killed."""
    report.cells["moved"] = "—"
    journal = folder / "fleet.jsonl"
    if not journal.exists():
        return
    table = [json.loads(line) for line in journal.read_text().split("\n") if line]
    names = {row["server"] for row in table}
    served = {row["server"] for row in table if row["to"] == "healthy"}
    fenced, moved = last["fleet/fenced"], last["fleet/moved"]
    told = f"servers {', '.join(sorted(served))} served; {fenced:.0f} fenced, {moved:.0f} requests moved"
    given_up = {row["server"] for row in table if row["to"] == "fenced"}
    kinds = [name.partition("-")[0] for name in sorted(given_up)]
    report.line(served == names and kinds == [report.killed] * bool(report.killed) and fenced >= len(kinds), told)
    for row in table if report.killed else ():
        print(
            f"     {row['server']}: {row['from']} -> {row['to']}, {row['moved']} requests moved; {row['why']}"[:200],
            flush=True,
        )
    report.cells["moved"] = f"{moved:.0f}"


# ------------------------------------------------------------------ reading


def run_folder(root: Path) -> Path:
    """The folder of the one run below a root."""
    (config,) = root.glob("*/*/config.yaml")
    return config.parent


def rows_of(root: Path) -> list[dict[str, Any]]:
    """Metrics by step, as far as whole lines are written."""
    found = list(root.glob("*/*/metrics.jsonl"))
    text = found[0].read_text() if found else ""
    return [row for row in map(json.loads, text[: text.rfind("\n") + 1].splitlines()) if row["step"] > 0]


def samples_of(folder: Path) -> Iterator[dict[str, Any]]:
    """All samples that were trained on."""
    for file in sorted((folder / "trajectories").iterdir()):
        with file.open(encoding="utf-8") as lines:  # splitlines would also end a line at U+2028, which answers may hold
            yield from map(json.loads, lines)


def digests_of(folder: Path) -> dict[str, str]:
    """The digest of each tensor of a model folder, in float32."""
    return {name: tensor_digest(tensor.float()) for name, tensor in FolderSource(folder).tensors()}


def last_line(file: Path) -> str:
    """The last line with something in it."""
    lines = [line.strip() for line in file.read_text(errors="replace").replace("\r", "\n").splitlines() if line.strip()]
    return lines[-1] if lines else ""


COLUMNS = ("seconds", "steps", "staleness", "verified", "gap", "before", "after", "moved", "left")


def table(reports: list[Report]) -> str:
    """One row a backend, in Markdown."""
    lines = [f"| backend | {' | '.join(COLUMNS)} | checks failed |", "|---" * (len(COLUMNS) + 2) + "|"]
    for report in reports:
        cells = " | ".join(report.cells.get(name, "") for name in COLUMNS)
        lines.append(f"| `{report.backend}` | {cells} | {report.failed} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
