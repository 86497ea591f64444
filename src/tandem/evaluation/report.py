"""Progress while it goes on, and the table at the end."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from tandem.evaluation.asking import Answer
from tandem.evaluation.scores import DataScores, Estimate, judged_by, score_of
from tandem.tracking.progress import duration

EVERY_S = 5.0


class ProgressLine:
    """A line now and then: samples done, accuracy so far, tokens a second, and the time left at the pace so far."""

    def __init__(self, total: int, done: int, file: TextIO | None = None, *, success: str | None = None):
        """``success``: `EvaluationConfig.success`."""
        self._success = success
        self.total, self.done, self.file = total, done, sys.stderr if file is None else file
        self._began = self._said = time.monotonic()
        self.made = self._tokens = 0
        self._scores: list[float] = []
        if done:
            self._say(f"{done} of {total} samples are recorded already")

    def answered(self, answer: Answer) -> None:
        self.made += 1
        self.done += 1
        self._tokens += answer.tokens
        score = score_of(judged_by([answer], self._success)[0])
        if score is not None:
            self._scores.append(score)
        if time.monotonic() - self._said >= EVERY_S:
            self._said = time.monotonic()
            self._say(self.line(answer.data))

    def line(self, data: str) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        accuracy = f"  accuracy {sum(self._scores) / len(self._scores):.1%}" if self._scores else ""
        left = duration((self.total - self.done) * seconds / max(1, self.made))
        return f"{data}  {self.done}/{self.total} samples{accuracy}  {self._tokens / seconds:.0f} tok/s  ETA {left}"

    def summary(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        return f"{self.made} samples, {self._tokens} tokens in {duration(seconds)}, {self._tokens / seconds:.0f} tok/s"

    def _say(self, text: str) -> None:
        print(text, file=self.file, flush=True)


def interval_text(estimate: Estimate) -> str:
    """`31.2 % [28.1, 34.5]`."""
    return f"{100 * estimate.value:.1f} % [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def table(results: Mapping[str, DataScores], average: Mapping[str, Estimate]) -> str:
    """A line for each data set, and the mean over data sets where there are several."""
    names = list(dict.fromkeys(name for scores in results.values() for name in scores.measures))
    several = max((scores.samples for scores in results.values()), default=1)
    heads = [f"avg@{several}" if name == "accuracy" and several > 1 else name for name in names]
    lines = [["data", "rows", *(heads or ["reward"]), "truncated", "no answer", "failed", "tokens"]]
    for data, scores in results.items():
        measured = [interval_text(scores.measures[name]) if name in scores.measures else "–" for name in names]
        ending = [share(scores.truncated), share(scores.extraction_failed), str(sum(scores.failed.values()))]
        lines.append(
            [data, str(scores.rows), *(measured or [f"{scores.reward:.4g}"]), *ending, f"{scores.completion_length:.0f}"]
        )
    if average:
        lines.append(["mean", "", *(interval_text(average[name]) if name in average else "–" for name in names), *[""] * 4])
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns below each other, the first to the left and the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def padded(line: Sequence[str]) -> str:
        rest = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join([line[0].ljust(widths[0]), *rest]).rstrip()

    return "\n".join(padded(line) for line in lines)


def notes(results: Mapping[str, DataScores], answers: Iterable[Answer]) -> list[str]:
    """Facts that the table leaves out: how intervals were made, and which samples failed: the first one for each reason."""
    first: dict[tuple[str, str | None], Answer] = {}
    for answer in answers:
        first.setdefault((answer.data, answer.failed), answer)
    said = []
    methods = sorted({estimate.method for scores in results.values() for estimate in scores.measures.values()})
    if methods:
        said.append(f"Intervals: {' or '.join(methods)}.")
    for data, scores in results.items():
        if not scores.measures:
            said.append(
                f"{data}: the reward states no accuracy and not all its values lie in 0…1, so only its mean is given; for "
                "avg@k and pass@k say when a sample is right, such as --success 'reward >= 1' (nothing is generated again), "
                "or let it return a dict with `accuracy` (docs/writing_a_reward.md)."
            )
        if scores.failed:
            said.append(f"{data}: samples that failed and count as wrong; all of them are in samples.jsonl, with `error`:")
        for reason, count in scores.failed.items():
            one = first[data, reason]
            said.append(f"  {reason} {count}, first row {one.row}, sample {one.sample}: {_cut(one.error)}")
    return said


def _cut(text: str, most: int = 300) -> str:
    """The first line."""
    line = text.partition("\n")[0]
    return line if len(line) <= most else f"{line[: most - 1]}…"
