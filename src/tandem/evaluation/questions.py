"""The rows of an evaluation, in the format of their benchmark, and their rewards. All rows are checked at the start."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.api.sandbox import COLUMN as PROGRAM_TESTS
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
"""Number of rows of a generated data set if `max_rows` is not set."""


@dataclass(frozen=True)
class Questions:
    """One data set of an evaluation."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    digests: tuple[str, ...]
    """Digest of each row as in its file. Rows of two evaluations are the same if their digests are equal."""

    reward: str
    reading: Reading

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.digests).encode()).hexdigest()[:16]


def open_questions(config: EvaluationConfig) -> list[Questions]:
    """Loads every data set.

    Raises:
        ConfigError: a name is unknown (the message suggests the nearest), data are missing or empty, the columns are not
            those of the benchmark, or two data sets have the same name.
    """
    questions = [_open(config, data) for data in config.data]
    names = [data_questions.name for data_questions in questions]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two data sets are called {name!r}; give them different names: data=[{{path: …, name: …}}, …]"
            )
    return questions


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
    usual = "math" if rows[0].get(PROGRAM_TESTS) is None else "code"
    reward = data.reward or config.reward or (usual if benchmark is None else benchmark.reward)
    _check_format(benchmark, name, rows[0], explicit=any(columns))
    rows = [{**row, SOURCE: name, REWARD: reward} for row in rows]
    return Questions(name, rows, tuple(row_digest(row, suffix) for row in rows), reward, dataset.readings[0])


def _check_format(benchmark: Benchmark | None, name: str, row: Mapping[str, Any], explicit: bool) -> None:
    if benchmark is None or explicit:
        return
    columns = {column.lower() for column in row}
    missing = [column for column in benchmark.columns if column.lower() not in columns]
    if missing:
        raise ConfigError(
            f"data set {name!r} has the name of {benchmark.title}, but no column {missing[0]!r}; "
            "name its columns (prompt_column, answer_column), or set benchmark: none for it"
        )


def row_digest(row: Mapping[str, Any], suffix: str) -> str:
    """Returns the digest of a row without ``suffix`` and Tandem's columns, so that evaluations that ask the same question
    with different suffixes can be compared."""
    columns = {key: value for key, value in row.items() if key != "messages" and key not in OURS}
    messages = json.loads(json.dumps(row["messages"], default=str))
    last = messages[-1]["content"]
    if suffix and isinstance(last, str):
        messages[-1]["content"] = last.removesuffix(suffix)
    elif suffix:
        messages[-1]["content"] = last[:-1]
    text = json.dumps([columns, messages], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def specs_of(questions: Sequence[Questions]) -> list[str]:
    """Returns the reward sums that judge the rows, without repetition, in the order of the data sets."""
    specs = dict.fromkeys(spec for data in questions for spec in (data.reward, *(row[REWARD] for row in data.rows)))
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
    """Builds one `Reward` that judges the rows of all data sets, and checks every row.

    Args:
        questions: the data sets.
        timeout_s: deadline of a reward call.
        plan: the result of `plan_scores`.
        services: services that a reward may request by name.
        asked: False if the workflow needs no reward, such as a workflow with an environment; then rows are not checked.
        awaited: see `build_sum`.

    Raises:
        ConfigError: a reward is unknown, or a row lacks what its reward needs, such as an answer; the message names the row.
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
        for data in questions if asked else ():
            for number, row in enumerate(data.rows, 1):
                try:
                    judges.check_row(row)
                except ConfigError as error:
                    where = row.get(WHERE) or f"row {number}"
                    raise ConfigError(f"{where} of data set {data.name!r}: {error}") from error
    except ConfigError:
        judges.close()
        raise
    return judges
