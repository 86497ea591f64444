"""`tandem compare A B`: two evaluations of the same rows, paired."""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.api.shared_files import aligned
from tandem.config.errors import ConfigError, nearest_names
from tandem.config.evaluation import EvaluationConfig, differences
from tandem.evaluation.asking import Answer
from tandem.evaluation.folder import SETTINGS, read_samples, read_settings
from tandem.evaluation.scores import (
    Test,
    bootstrap_means,
    judged_by,
    mcnemar,
    mean_rewards,
    percentiles,
    row_values,
    sign_flip,
)
from tandem.state.resuming import named_run

SIGNIFICANT = 0.05
REWARD = "reward"
"""Name of the mean reward among the measures. It is the only measure that is not a share."""


@dataclass(frozen=True)
class Recorded:
    """A finished evaluation, read from its folder."""

    path: Path
    settings: Mapping[str, Any]
    answers: Mapping[str, Sequence[Answer]]

    @property
    def label(self) -> str:
        return str(self.settings["config"].get("label") or self.path.name)

    @property
    def samples(self) -> int:
        return int(self.settings["config"]["gconfig"]["n_samples"])


@dataclass(frozen=True)
class Difference:
    """One measure on one data set, for the same rows of both evaluations. ``difference`` is second minus first; ``low`` and
    ``high`` are its confidence interval."""

    data: str
    measure: str
    rows: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    """Upper end of the confidence interval, from a paired bootstrap over rows."""

    p_value: float
    test: str
    only_first: int | None = None
    """Number of rows that only the first evaluation got right; None unless each row has one sample, right or wrong."""

    only_second: int | None = None


@dataclass(frozen=True)
class Comparison:
    """The result of `tandem compare`."""

    first: str
    second: str
    differences: tuple[Difference, ...]
    settings: tuple[tuple[str, Any, Any], ...]
    """(key, first value, second value) of each setting in which the evaluations differ."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def open_recorded(path: Path) -> Recorded:
    """Reads the folder of an evaluation.

    Raises:
        ConfigError: there is no evaluation, or it is not finished; then the message says how many samples it has.
    """
    settings, answers = read_settings(path), read_samples(path)
    total = sum(data["rows"] for data in settings["data"].values()) * int(settings["config"]["gconfig"]["n_samples"])
    if len(answers) < total:
        raise ConfigError(
            f"{path} is not finished: {len(answers)} of {total} samples; go on with `tandem eval` and the same settings"
        )
    return Recorded(path, settings, {name: [a for a in answers if a.data == name] for name in settings["data"]})


def find_recorded(name: str) -> list[Recorded]:
    """Returns the evaluations with this name: a folder, a label below `evaluations`, or a run, which stands for all finished
    evaluations of its checkpoint.

    Raises:
        ConfigError: there is no such evaluation, or it is not finished.
    """
    root = Path(EvaluationConfig().out)
    places = Path(name).expanduser(), root / name
    for place in places:
        if (place / SETTINGS).is_file():
            return [open_recorded(place)]
    if (run := named_run(name)) is None:
        names = [path.parent.name for path in root.glob(f"*/{SETTINGS}")]
        raise ConfigError(f"there is no evaluation {name}; {nearest_names(name, names)}. `tandem eval` makes one")
    checkpoint, evaluations = run.checkpoint.resolve(), []
    for path in sorted(root.glob(f"*/{SETTINGS}")):
        if Path(read_settings(path.parent)["config"].get("model", "")).resolve() == checkpoint:
            with contextlib.suppress(ConfigError):  # skips an unfinished evaluation
                evaluations.append(open_recorded(path.parent))
    if not evaluations:
        raise ConfigError(
            f"there is no finished evaluation of {checkpoint} below {root}: tandem eval {name} --data …, "
            "or name a step that was evaluated"
        )
    return evaluations


def find_pair(first: str, second: str) -> tuple[Recorded, Recorded]:
    """Returns the two named evaluations. If a name stands for several evaluations, picks the pair with the same rows.

    Raises:
        ConfigError: there is no such pair, or there are several.
    """
    candidates = list(itertools.product(find_recorded(first), find_recorded(second)))
    if len(candidates) == 1:
        return candidates[0]
    pairs = []
    for pair in (pair for pair in candidates if pair[0].path != pair[1].path):
        with contextlib.suppress(ConfigError):
            check_same_rows(*pair)
            pairs.append(pair)
    if len(pairs) == 1:
        return pairs[0]
    listed = "; ".join(f"{one.path} and {other.path}" for one, other in pairs or candidates)
    raise ConfigError(
        f"{len(pairs)} pairs of evaluations of {first} and {second} have the same rows; name one of these pairs: {listed}"
    )


def compare(first: Recorded, second: Recorded, *, seed: int = 0, confidence: float = 0.95) -> Comparison:
    """Compares every common measure, and the mean reward, on every data set. ``confidence``: level of the intervals.

    Raises:
        ConfigError: the data sets or their rows differ; the message names them.
    """
    check_same_rows(first, second)
    ks = [k for k in first.settings["config"]["k"] if k in second.settings["config"]["k"]]
    compared = []
    for data in first.settings["data"]:
        judged = [
            judged_by(evaluation.answers[data], evaluation.settings["config"].get("success"))
            for evaluation in (first, second)
        ]
        votes = first.settings["config"].get("success") is None
        pair = [row_values(evaluation, ks, votes=votes) for evaluation in judged]
        rewards = [mean_rewards(evaluation) for evaluation in judged]
        both = [row for row in rewards[0] if row in rewards[1]]  # rows with a judged sample in both evaluations
        measures = {name: (pair[0][name], pair[1][name]) for name in pair[0] if name in pair[1]}
        if both:
            measures[REWARD] = [rewards[0][row] for row in both], [rewards[1][row] for row in both]
        for measure, values in measures.items():
            compared.append(_difference(data, measure, *values, first, second, seed, confidence))
    if not compared:
        raise ConfigError("there is nothing to compare: no row has a sample that was judged in both")
    first_settings, other = (
        {**recorded.settings["config"], "files": recorded.settings["files"]} for recorded in (first, second)
    )
    changed = tuple(item for item in differences(first_settings, other) if item[0] not in ("label", "out"))
    alike = first.label == second.label
    names = (str(first.path), str(second.path)) if alike else (first.label, second.label)
    return Comparison(names[0], names[1], tuple(compared), changed)


def check_same_rows(first: Recorded, second: Recorded) -> None:
    """Raises `ConfigError` unless both evaluations used the same rows, rewards and rule of success."""
    rules = [recorded.settings["config"].get("success") for recorded in (first, second)]
    if len(set(rules)) > 1:
        words = " and ".join(f"--success '{rule}'" if rule else "the reward alone" for rule in rules)
        raise ConfigError(
            f"the evaluations use different rules for a right sample ({words}); repeat the command of one of them with the "
            "rule of the other: its samples are counted anew, and nothing is generated"
        )
    names = list(first.settings["data"]), list(second.settings["data"])
    if set(names[0]) != set(names[1]):
        raise ConfigError(
            f"the evaluations are of different data: {first.path} has {', '.join(names[0])}, {second.path} has "
            f"{', '.join(names[1])}; only the same rows can be compared"
        )
    for name in names[0]:
        first_digests, second_digests = (recorded.settings["row_digests"][name].split() for recorded in (first, second))
        if len(first_digests) != len(second_digests):
            raise ConfigError(
                f"data set {name!r} has {len(first_digests)} rows in {first.path} and {len(second_digests)} in "
                f"{second.path}; evaluate the same rows (max_rows, split)"
            )
        if first_digests != second_digests:
            row = next(i for i, pair in enumerate(zip(first_digests, second_digests, strict=True)) if pair[0] != pair[1])
            raise ConfigError(
                f"the rows of data set {name!r} in {first.path} and {second.path} differ, first in row {row}; only the same "
                "questions with the same expected answers can be compared"
            )
        rewards = {recorded.settings["data"][name]["reward"] for recorded in (first, second)}
        if len(rewards) > 1:
            raise ConfigError(
                f"the two evaluations judged data set {name!r} with different rewards ({' and '.join(sorted(rewards))}); "
                "repeat one of them with the reward of the other"
            )


def _difference(
    data: str,
    measure: str,
    first_values: Sequence[float],
    second_values: Sequence[float],
    first: Recorded,
    second: Recorded,
    seed: int,
    confidence: float,
) -> Difference:
    gaps = [b - a for a, b in zip(first_values, second_values, strict=True)]
    low, high = percentiles(bootstrap_means(gaps, seed), confidence)
    single = (
        measure != REWARD and first.samples == second.samples == 1 and set(first_values) | set(second_values) <= {0.0, 1.0}
    )
    only = (sum(gap < 0 for gap in gaps), sum(gap > 0 for gap in gaps)) if single else (None, None)
    test: Test = mcnemar(*only) if only[0] is not None and only[1] is not None else sign_flip(gaps, seed)
    count = len(gaps)
    return Difference(
        data=data,
        measure=measure,
        rows=count,
        first=sum(first_values) / count,
        second=sum(second_values) / count,
        difference=sum(gaps) / count,
        low=low,
        high=high,
        p_value=test.p_value,
        test=test.method,
        only_first=only[0],
        only_second=only[1],
    )


def describe(comparison: Comparison) -> str:
    lines = [["data", "measure", "rows", comparison.first, comparison.second, "difference", "p"]]
    for difference in comparison.differences:
        if difference.measure == REWARD:
            gap = f"{difference.difference:+.3g} [{difference.low:+.3g}, {difference.high:+.3g}]"
            values = [f"{value:.4g}" for value in (difference.first, difference.second)]
        else:
            gap = f"{100 * difference.difference:+.1f} [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"
            values = [f"{100 * value:.1f} %" for value in (difference.first, difference.second)]
        lines.append([difference.data, difference.measure, str(difference.rows), *values, gap, f"{difference.p_value:.3g}"])
    paragraphs = [*aligned(lines, figures=True)]
    for difference in comparison.differences:
        if difference.only_first is not None:
            paragraphs.append(
                f"{difference.data}: {difference.only_first} rows right only with {comparison.first}, "
                f"{difference.only_second} only with {comparison.second}."
            )
    tests = sorted({difference.test for difference in comparison.differences})
    paragraphs.append(
        f"Differences in percentage points, of rewards in their unit; intervals: paired bootstrap over rows; "
        f"p: {' or '.join(tests)}."
    )
    clear = [difference for difference in comparison.differences if difference.p_value < SIGNIFICANT]
    if not clear:
        paragraphs.append(f"No difference is significant at {SIGNIFICANT:g}.")
    elif len(comparison.differences) > 1:
        paragraphs.append(
            f"{len(clear)} of {len(comparison.differences)} are below {SIGNIFICANT:g}; p is not corrected for their number."
        )
    if comparison.settings:
        paragraphs.append(
            "The evaluations differ in " + ", ".join(f"{key} ({a} / {b})" for key, a, b in comparison.settings) + "."
        )
    return "\n".join(paragraphs)
