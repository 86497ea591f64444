"""Small evaluations for these tests."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.config.evaluation import load_evaluation
from tandem.evaluation.asking import Answer, AskingTerms, ask
from tandem.evaluation.run import evaluate_model
from tandem.evaluation.scores import metrics_of
from tandem.evaluation.validation import asks_of
from tandem.rollout.event_loop import BackgroundLoop

DATA = Path(__file__).resolve().parents[1] / "data_files"
FILES = ("evaluation.json", "samples.jsonl", "results.json")


def settings(model: Path, out: Path, *more: str) -> list[str]:
    """Keys of an evaluation of a few rows; later ones win."""
    items = [
        f"model={model}",
        f"data=[{DATA}/gsm8k]",
        "reward=gsm8k",  # what these rows have by themselves, `math`, starts a process that imports for a second
        f"out={out}",
        "label=first",
        "max_rows=6",
        "gconfig.n_samples=2",
        "gconfig.max_new_tokens=12",
        "wave_samples=4",
        "engine.kv_cache_gib=0.05",
        "threads=1",
        "dtype=float32",
    ]
    return list({item.partition("=")[0]: item for item in [*items, *more]}.values())


def evaluated(model: Path, out: Path, *more: str):
    """Runs it."""
    return evaluate_model(load_evaluation(None, settings(model, out, *more)).config)


def contents(folder: Path) -> dict[str, bytes]:
    """File → what it holds."""
    return {name: (folder / name).read_bytes() for name in FILES}


def answer(row: int, score: float | None, *, sample: int = 0, data: str = "d", said: str | None = "1", **more) -> Answer:
    """A judged sample."""
    given = {"reward": score or 0.0, "accuracy": score, "answer": said, "extracted": said is not None, "stop_reason": "stop"}
    return Answer(data, row, sample, **given | more)


@dataclass(frozen=True)
class Evaluation:
    """What came of it. A sample whose episode failed counts as wrong in ``accuracy``, its row is counted in ``failed``."""

    accuracy: float
    """Mean over all samples; NaN where the reward states none and its value is no share."""

    reward: float
    completion_length: float
    truncated: float
    failed: int
    rows: int
    values: dict[str, float] = field(default_factory=dict)
    """All of them by metric name, with several samples also ``eval/pass@k`` and ``eval/maj@k``."""


def summarise(answers: Sequence[Answer], n_samples: int, rows: int) -> Evaluation:
    """The figures of an evaluation beside training."""
    values = metrics_of(answers, n_samples)
    return Evaluation(
        accuracy=values.get("eval/accuracy", float("nan")),
        reward=values["eval/reward"],
        completion_length=values["eval/completion_length"],
        truncated=values["eval/truncated"],
        failed=int(values["eval/failed"]),
        rows=rows,
        values=values,
    )


def evaluate(engine, workflow, rows, *, n_samples: int = 1, loop: BackgroundLoop | None = None, **terms) -> Evaluation:
    """The figures of an evaluation beside training, on a loop that runs or on one of its own."""
    with contextlib.closing(BackgroundLoop()) as own:
        answers = ask(engine, loop or own, workflow, asks_of(rows, n_samples), AskingTerms(**terms))
    return summarise(answers, n_samples, len(rows))
