"""Rows to be asked: loaded in the form of their benchmark, each with the reward that judges it, all checked at start."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.api.program_tests import COLUMN as PROGRAM_TESTS
from tandem.api.services import NOTHING, Services
from tandem.api.workflow import RewardFn
from tandem.config.data import OURS, REWARD, SOURCE, WHERE, DatasetConfig
from tandem.config.errors import ConfigError
from tandem.config.evaluation import EvaluationConfig, EvaluationData
from tandem.config.recipes import sums_of
from tandem.data.dataset import load_dataset
from tandem.data.known import Benchmark, find_benchmark, locate, recognise
from tandem.data.table import Reading
from tandem.flow.plan import RunPlan
from tandem.flow.services import refuse_only_groups
from tandem.rewards.build import build_sum
from tandem.rewards.reward import Reward

PROCEDURAL_ROWS = 500
"""Rows of a procedural data set where `max_rows` says nothing."""


@dataclass(frozen=True)
class Questions:
    """One data set of an evaluation."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    digests: tuple[str, ...]
    """Digest of each row as it stands in its file: equal digests make two evaluations' rows the same."""

    reward: str
    reading: Reading

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.digests).encode()).hexdigest()[:16]


def open_questions(config: EvaluationConfig) -> list[Questions]:
    """Loads every data set.

    Raises:
        ConfigError: unknown name (tells the nearest), missing or empty data, columns that are not those of the benchmark,
            two data sets of one name.
    """
    found = [_open(config, data) for data in config.data]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two data sets are called {name!r}; give them different names: data=[{{path: …, name: …}}, …]"
            )
    return found


def _open(config: EvaluationConfig, data: EvaluationData) -> Questions:
    benchmark = find_benchmark(data.benchmark) if data.benchmark not in (None, "none") else None
    place, from_hub = locate(data.path, config.data_root)
    if data.benchmark is None:
        benchmark = recognise(data.path) or recognise(place)
    columns = (data.prompt_column or config.prompt_column, data.answer_column or config.answer_column)
    suffix = next((text for text in (data.prompt_suffix, config.prompt_suffix) if text is not None), None)
    if suffix is None:
        suffix = benchmark.prompt_suffix if benchmark is not None else ""
    hub_split = benchmark.hub_split if benchmark is not None and from_hub else None
    max_rows = data.max_rows or config.max_rows
    dataset = load_dataset(
        DatasetConfig(
            path=place,
            split=data.split or config.split or hub_split,
            prompt_column=columns[0],
            answer_column=columns[1],
            max_rows=max_rows,
            size=max_rows or PROCEDURAL_ROWS,
            prompt_suffix=suffix,
        ),
        default_split="test",
    )
    rows = dataset.rows
    if benchmark is None and data.benchmark is None:
        benchmark = recognise(place, rows)
    name = data.name or (benchmark.name if benchmark is not None else Path(place.rpartition(":")[2]).stem)
    reward = data.reward or config.reward or (benchmark.reward if benchmark is not None else _judge(rows[0]))
    _check_format(benchmark, name, rows[0], explicit=any(columns))
    rows = [{**row, SOURCE: name, REWARD: reward} for row in rows]
    return Questions(name, rows, tuple(row_digest(row, suffix) for row in rows), reward, dataset.readings[0])


def _judge(row: Mapping[str, Any]) -> str:
    return "math" if row.get(PROGRAM_TESTS) is None else "code"


def _check_format(benchmark: Benchmark | None, name: str, row: Mapping[str, Any], explicit: bool) -> None:
    if benchmark is None or explicit:
        return
    there = {column.lower() for column in row}
    missing = [column for column in benchmark.columns if column.lower() not in there]
    if missing:
        raise ConfigError(
            f"data set {name!r} is taken for {benchmark.title} by its name, but has no column {missing[0]!r}; "
            "name its columns (prompt_column, answer_column), or set benchmark: none for it"
        )


def row_digest(row: Mapping[str, Any], suffix: str) -> str:
    """Digest of a row without the configuration's additions, so that two ways to ask the same question can be compared."""
    kept = {key: value for key, value in row.items() if key != "messages" and key not in OURS}
    messages = json.loads(json.dumps(row["messages"], default=str))
    last = messages[-1]["content"]
    if suffix and isinstance(last, str):
        messages[-1]["content"] = last.removesuffix(suffix)
    elif suffix:
        messages[-1]["content"] = last[:-1]
    text = json.dumps([kept, messages], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def specs_of(questions: Sequence[Questions]) -> list[str]:
    """The sums that judge rows, those of the first data set first."""
    specs = dict.fromkeys(spec for one in questions for spec in (one.reward, *(row[REWARD] for row in one.rows)))
    return list(dict.fromkeys(name for spec in specs for name in sums_of(spec)))


def make_judges(
    questions: Sequence[Questions],
    timeout_s: float,
    plan: RunPlan,
    services: Services | None = None,
    *,
    asked: bool = True,
    awaited: Mapping[str, RewardFn] = NOTHING,
) -> Reward:
    """The reward of each data set, as one; every row is checked. ``plan``: of `plan_scores`. ``services``: what a reward may
    ask for by name. ``asked``: False where the workflow does without, as one with an environment. ``awaited``: see
    `build_sum`.

    Raises:
        ConfigError: an unknown reward, or a row that lacks what it needs, an answer for example; says which row.
    """
    batch = bool(plan.scores)
    sums = {
        name: build_sum(name, terms, timeout_s=timeout_s, services=services, batch=batch, awaited=awaited)
        for name, terms in plan.sums.items()
    }
    judges = Reward(questions[0].reward, sums)
    try:
        for name, summed in sums.items():
            refuse_only_groups(name, summed)
        for one in questions if asked else ():
            for number, row in enumerate(one.rows, 1):
                try:
                    judges.check_row(row)
                except ConfigError as error:
                    where = row.get(WHERE) or f"row {number}"
                    raise ConfigError(f"{where} of data set {one.name!r}: {error}") from error
    except ConfigError:
        judges.close()
        raise
    return judges
