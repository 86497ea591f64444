"""Random small mistakes in the formulas, the roles and the rollout, and which test notices each.

    python -m scripts.mutations                                   # 200, of seed 0
    python -m scripts.mutations --count 50 --seed 3 --rooms algorithms --out FOLDER
    python -m scripts.mutations --missed                          # those that were missed, once more, with the tests of now
    python -m scripts.mutations --missed --also tests/rollout/test_collective.py      # and with these, slow ones too

Everything runs in a copy of the tree, below ``--out`` (/tmp/tandem-mutations), where the results are too. First the tests
run once under a tracer, which notes the lines that each of them executes; then each mutant runs the tests that execute its
lines, the quickest first, until one fails. A test that hangs has noticed too. A run that was interrupted goes on where it
was; ``table.md`` says what came of each mutant. To pay for imports once, the process imports the libraries (not Tandem) and
forks for each mutant. Not for Windows.
"""

import argparse
import compileall
import contextlib
import hashlib
import importlib
import json
import os
import py_compile
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.mutants import Mutant, mutants

ROOMS = ("algorithms", "roles", "rollout")
TESTS = (
    "tests/algorithms",
    "tests/roles",
    "tests/rollout",
    "tests/rewards/test_majority.py",
    "tests/data/test_curriculum.py",
    "tests/config/test_algorithm_combinations.py",
    "tests/docs/test_algorithm_pages.py",
    "tests/cli/test_algorithms_command.py",
    "tests/trainers/test_distill.py",
    "tests/trainers/test_evaluation_and_parts.py",
    "tests/trainers/test_multi_turn.py",
    "tests/trainers/test_own_workflows.py",
    "tests/trainers/test_preference_trainers.py",
    "tests/trainers/test_verification.py",
    "tests/state/test_ledger_file.py",
)
"""Quick tests that import these rooms."""

LONGEST_TEST_S = 8.0
"""Tests that took longer under the tracer are left out."""

MOST_SECONDS = 60.0
"""Tests of one mutant, by the time that they took under the tracer; the slowest that do not fit are left out."""

COPIED = (
    "src",
    "tests",
    "docs",
    "examples",
    "benchmarks",
    "scripts",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "Makefile",
)
BROKEN = 70
"""Exit status of a process that could not run the tests."""

OPTIONS = ["-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider"]
QUICK = ["-m", "not slow and not invariant"]
ALSO_TIMEOUT_S = 600.0


class Tracing:
    """A plugin that notes which lines of the rooms each test executes, and how long it took."""

    def __init__(self, source: Path):
        self.files = {str(file): str(file.relative_to(source)) for room in ROOMS for file in (source / room).glob("*.py")}
        self.lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.seconds: dict[str, float] = Counter()
        self.failed: set[str] = set()
        self._test = ""

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        module = self.files.get(frame.f_code.co_filename)
        if module is None:
            return None
        lines = self.lines[module]

        def inside(frame: Any, event: str, argument: Any) -> Any:
            lines[frame.f_lineno].add(self._test)
            return inside

        return inside

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._test = item.nodeid
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        yield
        sys.settrace(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def result(self) -> dict[str, Any]:
        usable = {name for name, seconds in self.seconds.items() if seconds <= LONGEST_TEST_S} - self.failed
        lines = {
            module: {line: sorted(names & usable) for line, names in by_line.items()}
            for module, by_line in self.lines.items()
        }
        libraries = [
            name for name, module in list(sys.modules.items()) if "site-packages" in (getattr(module, "__file__", "") or "")
        ]
        return {
            "seconds": {name: self.seconds[name] for name in sorted(usable)},
            "left_out": sorted(set(self.seconds) - usable),
            "lines": lines,
            "libraries": libraries,
        }


class Watching:
    """A plugin that writes down the test that runs, and the first that fails."""

    def __init__(self, file: Path):
        self.file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.file.write_text(f"hangs\t{nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.file.write_text(f"fails\t{report.nodeid}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.file.write_text(f"fails\timport of {report.nodeid}")


@dataclass
class Outcome:
    """The outcome of one mutant."""

    key: str
    caught: bool
    by: str
    tests: int
    seconds: float


def forked(work: Callable[[], int], tree: Path, log: Path, timeout_s: float) -> int | None:
    """The exit status of ``work`` in a process of its own that sees the tree; None if it took too long."""
    child = os.fork()
    if child == 0:
        status = BROKEN
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.chdir(tree)
            sys.path[:0] = [str(tree / "src"), str(tree)]
            os.environ["PYTHONPATH"] = str(tree / "src")
            status = int(work())
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    deadline, status = time.monotonic() + timeout_s, None
    try:
        while status is None and time.monotonic() < deadline:
            time.sleep(0.02)
            done, code = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if done else None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also what the tests left behind
        if status is None:
            os.waitpid(child, 0)
    return status


class Campaign:
    """One folder: the copy of the tree, the map from lines to tests, and results as they come."""

    def __init__(self, root: Path, out: Path):
        self.root, self.out, self.tree = root, out, out / "tree"
        self.results = out / "results.jsonl"
        out.mkdir(parents=True, exist_ok=True)

    def copy(self) -> None:
        """The tree as it is now; the interpreter compares compiled files with the source itself, not with its time."""
        shutil.rmtree(self.tree, ignore_errors=True)
        self.tree.mkdir()
        for name in COPIED:
            origin = self.root / name
            if origin.is_dir():
                shutil.copytree(origin, self.tree / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            else:
                shutil.copy(origin, self.tree / name)
        compileall.compile_dir(self.tree / "src", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)

    def map(self) -> dict[str, Any]:
        """The tests that execute each line; measured again when the rooms or the tests have changed."""
        digest = hashlib.sha256()
        for folder in [*(self.tree / "src/tandem" / room for room in ROOMS), *(self.tree / name for name in TESTS)]:
            for file in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
                digest.update(file.read_bytes())
        file = self.out / f"map-{digest.hexdigest()[:16]}.json"
        if not file.is_file():

            def measure() -> int:
                tracing = Tracing(self.tree / "src/tandem")
                status = pytest.main([*OPTIONS, *QUICK, *TESTS], plugins=[tracing])
                if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                    file.write_text(json.dumps(tracing.result()))
                return int(status)

            print("measuring which tests execute which lines …", flush=True)
            status = forked(measure, self.tree, self.out / "map.log", 3600)
            if not file.is_file():
                raise SystemExit(f"the tests do not run here (status {status}); see {self.out / 'map.log'}")
        found: dict[str, Any] = json.loads(file.read_text())
        print(
            f"{len(found['seconds'])} tests in use, {len(found['left_out'])} left out (slow, skipped or failing)", flush=True
        )
        return found

    def chosen(self, rooms: list[str], count: int, seed: int) -> list[Mutant]:
        """``count`` of all mutants: a change elsewhere in the source leaves the others chosen as they were."""
        every: list[Mutant] = []
        for room in rooms:
            for file in sorted((self.tree / "src/tandem" / room).glob("*.py")):
                every += mutants(file.read_bytes(), f"{room}/{file.name}")
        print(f"{len(every)} mutants are possible in {', '.join(rooms)}", flush=True)
        return sorted(every, key=lambda one: random.Random(f"{seed}/{one.key}").random())[:count]

    def done(self) -> dict[str, Outcome]:
        """The last outcome of each mutant so far."""
        if not self.results.is_file():
            return {}
        found = [Outcome(**json.loads(line)) for line in self.results.read_text().splitlines()]
        return {one.key: one for one in found}

    def tests_for(self, mutant: Mutant, source: bytes, measured: dict[str, Any]) -> list[str]:
        """The tests that execute its lines, the quickest first, as many as there is time for.

        Of what only an import executes, such as a default: those that execute its module, and all of its room.
        """
        by_line = measured["lines"].get(mutant.module, {})
        last = mutant.line + source[mutant.begin : mutant.end].count(b"\n")
        names = {name for line in range(mutant.line, last + 1) for name in by_line.get(str(line), ())}
        if not names:
            room = f"tests/{mutant.module.partition('/')[0]}/"
            names = {name for tests in by_line.values() for name in tests}
            names |= {name for name in measured["seconds"] if name.startswith(room)}
        chosen, total = [], 0.0
        for name in sorted(names, key=lambda name: measured["seconds"][name]):
            total += measured["seconds"][name]
            if total <= MOST_SECONDS:
                chosen.append(name)
        return chosen

    def run(self, mutant: Mutant, measured: dict[str, Any], also: list[str]) -> Outcome:
        """Makes the mistake, runs the tests, undoes it. ``also``: files of tests that run after those, slow ones too."""
        file = self.tree / "src/tandem" / mutant.module
        source, began = file.read_bytes(), time.monotonic()
        tests = self.tests_for(mutant, source, measured)
        limit_s = 60 + 4 * sum(measured["seconds"][name] for name in tests)
        rounds = [([*OPTIONS, *QUICK, *tests], limit_s)] if tests else []
        rounds += [([*OPTIONS, *also], ALSO_TIMEOUT_S)] if also else []
        by = ""
        try:
            file.write_bytes(mutant.applied(source))
            for arguments, limit_s in rounds:
                by = by or self._noticed(arguments, limit_s, mutant)
        finally:
            file.write_bytes(source)
        return Outcome(mutant.key, bool(by), by, len(tests), round(time.monotonic() - began, 1))

    def _noticed(self, arguments: list[str], limit_s: float, mutant: Mutant) -> str:
        """The first test that fails or hangs, empty if none does."""
        seen, log = self.out / "seen.txt", self.out / "last.log"
        seen.write_text("")
        status = forked(lambda: int(pytest.main([*arguments, "-x"], plugins=[Watching(seen)])), self.tree, log, limit_s)
        what, _, name = seen.read_text().partition("\t")
        if status is None:
            return f"hangs: {name}"
        if status != 0 and not (what == "fails" and status in (1, 2, 4)):
            raise SystemExit(f"{mutant.module}:{mutant.line} ended with status {status}; see {log}")
        return name if status else ""


def table(chosen: list[Mutant], done: dict[str, Outcome]) -> str:
    """The outcome of each mutant, the missed ones first."""
    rows = [(one, done[one.key]) for one in chosen if one.key in done]
    caught = sum(outcome.caught for _, outcome in rows)
    lines = [
        f"{len(rows)} mutants, {caught} caught, {len(rows) - caught} missed.",
        "",
        "| kind | made | caught |",
        "|---|---|---|",
    ]
    made, noticed = Counter(one.kind for one, _ in rows), Counter(one.kind for one, outcome in rows if outcome.caught)
    lines += [f"| {kind} | {made[kind]} | {noticed[kind]} |" for kind in sorted(made)]
    lines += ["", "| where | kind | statement | before | after | caught by |", "|---|---|---|---|---|---|"]
    for one, outcome in sorted(rows, key=lambda row: (row[1].caught, row[0].module, row[0].line)):
        cells = [f"{one.module}:{one.line}", one.kind, one.statement, one.before, one.after]
        by = outcome.by if outcome.caught else f"**missed** by {outcome.tests} tests {outcome.by}"
        lines.append(" | ".join(["", *(cell.replace("|", "\\|").replace("\n", " ")[:90] for cell in cells), by, ""]).strip())
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=ROOMS)
    parser.add_argument("--out", type=Path, default=Path("/tmp/tandem-mutations"))
    parser.add_argument("--missed", action="store_true", help="run those that were missed once more")
    parser.add_argument(
        "--also", nargs="+", default=[], help="files of tests, slow ones too, that run after the chosen ones"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    campaign = Campaign(Path(__file__).parents[1], arguments.out)
    campaign.copy()
    measured = campaign.map()
    for name in measured["libraries"]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    chosen, done = campaign.chosen(arguments.rooms, arguments.count, arguments.seed), campaign.done()
    left = [one for one in chosen if one.key not in done or (arguments.missed and not done[one.key].caught)]
    for i, one in enumerate(left, 1):
        outcome = done[one.key] = campaign.run(one, measured, arguments.also)
        with campaign.results.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        verdict = "caught" if outcome.caught else "MISSED"
        change = f"{one.before[:50]!r} → {one.after[:50]!r}"
        print(
            f"{i}/{len(left)} {verdict} {one.module}:{one.line} {one.kind}: {change} ({outcome.by}, {outcome.seconds} s)",
            flush=True,
        )
        (campaign.out / "table.md").write_text(table(chosen, done))
    missed = [one for one in chosen if not done[one.key].caught]
    print(f"{len(chosen)} mutants, {len(missed)} missed; {campaign.out / 'table.md'}")
    return min(len(missed), 100)


if __name__ == "__main__":
    sys.exit(main())
