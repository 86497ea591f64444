"""Evaluation of a run on held-out rows: within its steps, or by a job of its own.

Within a run, the engine and the workflow of the run are used. `tandem eval --follow RUN` evaluates a run as a separate job,
during the run (`evaluate.where=job`) or after it. It consumes checkpoints as the run writes them; it produces
`evaluations/step_N/` in the run's folder, and a line of metrics for each in its `evaluations.jsonl`. The metrics equal those
that the run would have measured itself.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.api.shared_files import append_line
from tandem.config.arithmetic import evaluation_gconfig, evaluation_places, generating_ranks, is_evaluation_due
from tandem.config.data import REWARD, SOURCE
from tandem.config.errors import ConfigError
from tandem.config.evaluation import EvaluationConfig, load_evaluation
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.yaml_file import COMMAND_LINE, Assignment, Scalar
from tandem.data.dataset import load_dataset
from tandem.evaluation.asking import Answer, Ask, AskingTerms, Groups, KeptSamples, ask
from tandem.evaluation.folder import EvaluationFolder
from tandem.evaluation.questions import Questions, row_digest
from tandem.evaluation.run import SHARED, evaluate_model
from tandem.evaluation.scores import metrics_of
from tandem.flow.opening import Rows, validation_config
from tandem.flow.session import Session
from tandem.models.families import use_family
from tandem.state.existing import checkpoints, existing_run, rows_of, status_now, step_of, take_lock
from tandem.state.export import checkpoint_of
from tandem.state.resuming import named_run, no_run


def asks_of(rows: Sequence[Mapping[str, Any]], n_samples: int = 1, part: slice = slice(None)) -> list[Ask]:
    """Returns an `Ask` for each of ``n_samples`` samples of the rows in ``part``. Rows keep their numbers."""
    return [
        Ask(str(row.get(SOURCE) or ""), index, sample, row)
        for index, row in list(enumerate(rows))[part]
        for sample in range(n_samples)
    ]


def evaluate(config: TrainConfig, session: Session, rows: Rows) -> dict[str, float]:
    """Evaluates the validation rows and returns the metrics ``eval/…``; an empty dict on ranks other than 0. Collective.

    Runs on the executor's event loop, together with running episodes. Each rank with an engine generates its share of rows.
    """
    answers: list[Answer] = []
    sample_store = KeptSamples()
    generating = generating_ranks(config)

    with session.team.together():
        if session.engine is not None:
            part = slice(generating.index(session.team.rank), None, len(generating))
            terms = AskingTerms(
                config.seed,
                config.rollout.episode_timeout_s,
                max_concurrent=evaluation_places(config),
                together=config.deterministic,
                on_samples=sample_store.keep if session.scorer else None,
            )
            asks = asks_of(rows.valid, config.evaluate.n_samples, part)
            answers = ask(session.engine, session.rollout.loop, session.episodes.examiner, asks, terms)
    if len(generating) > 1:
        shares = session.team.gather((answers, sample_store.groups))
        answers, sample_store.groups = _of_all(shares, first=session.team.main)
    if session.scorer:
        answers = sample_store.scored(session.scorer, answers)
    return metrics_of(answers, config.evaluate.n_samples) if answers else {}


def _of_all(shares: Sequence[tuple[list[Answer], Groups]], *, first: bool) -> tuple[list[Answer], Groups]:
    """Joins the answers and samples of all ranks, in the order of rows. ``first``: True on the first rank; on the others the
    results are empty."""
    if not first:
        return [], {}
    answers = sorted((answer for part, _ in shares for answer in part), key=lambda answer: (answer.row, answer.sample))
    return answers, {place: group for _, groups in shares for place, group in groups.items()}


FIGURES = "evaluations.jsonl"
FREE = ("device", "dtype", "threads", "wave_samples", "engine.")
"""Keys that may differ between the job and the run."""

LOOK_S = 2.0
"""Seconds between checks for a new checkpoint."""

FOLLOWED = (
    f"another tandem eval --follow writes {{folder}}: {{who}}. Its metrics go into {FIGURES} of the run, so a second job is "
    "not needed; to replace the first job, stop it first"
)


def follow(name: str, overrides: Sequence[Any] = (), look_s: float = LOOK_S) -> Iterator[Mapping[str, Any]]:
    """Evaluates the run's initial model and each checkpoint that is due (`evaluate.every_steps`) once, until the run has
    ended and all are evaluated. Yields the metrics of each evaluation, with `step`, when it is done.

    Args:
        name: the run.
        overrides: ``key=value`` of `EvaluationConfig`; only keys about the machine (`FREE`).
        look_s: seconds between checks for a new checkpoint.

    Raises:
        ConfigError: there is no such run, its evaluation is off, or an override is not in `FREE`.
        RunFolderInUse: another process follows the run; the message names it.
    """
    run = named_run(name)
    if run is None:
        raise ConfigError(no_run(name))
    if run.step is not None:
        raise ConfigError(f"{name}: --follow evaluates the whole run; leave @{run.step} out")
    folder = run.folder
    config = load_config(TrainConfig, folder / "config.yaml").config
    if config.evaluate.every_steps is None:
        raise ConfigError(
            f"{folder}: evaluate.every_steps is null, so the run has no evaluation; set it in its configuration"
        )
    if config.extend.model_family is not None:
        use_family(config.extend.model_family)
    questions, base = _questions(config), _base(config, overrides)
    home = folder / "evaluations"
    EvaluationFolder.check(home, None)  # raises if the folder cannot be created
    home.mkdir(exist_ok=True)
    with take_lock(home, FOLLOWED):
        yield from _measured(folder, config, questions, base, look_s)


def _measured(
    folder: Path, config: TrainConfig, questions: Sequence[Questions], base: EvaluationConfig, look_s: float
) -> Iterator[Mapping[str, Any]]:
    every, done = config.evaluate.every_steps, {row.get("step") for row in rows_of(folder / FIGURES)}
    while True:
        status = status_now(existing_run(folder) or _gone(folder))["status"]  # before listing: an ended run has saved all
        saved = checkpoints(folder / "checkpoints")
        last = step_of(saved[-1]) if saved and status not in ("running", "elsewhere") else 0
        due = [step_of(path) for path in saved if is_evaluation_due(every, step_of(path), last)]
        for step in [step for step in (0, *due) if step not in done]:
            try:
                model = config.actor.path if step == 0 else str(checkpoint_of(folder, str(step)).absolute())
                config_of_step = replace(base, model=model, out=str(folder / "evaluations"), label=f"step_{step}")
                answers = evaluate_model(config_of_step, questions).answers
            except (ConfigError, FileNotFoundError) as error:
                if step == 0 or (folder / "checkpoints" / f"step_{step}").exists():
                    raise
                print(
                    f"step {step}: the checkpoint was removed before its evaluation ({error}); raise checkpoint.keep_last",
                    file=sys.stderr,
                )
                done.add(step)
                continue
            sources = [str(row.get(SOURCE) or "") for row in questions[0].rows]
            named = [replace(answer, data=sources[answer.row]) for answer in answers]
            figures = {"step": step, "time": round(time.time(), 3)} | metrics_of(named, config.evaluate.n_samples)
            append_line(folder / FIGURES, json.dumps(figures))
            done.add(step)
            yield figures
        if status not in ("running", "elsewhere") and checkpoints(folder / "checkpoints") == saved:
            return
        time.sleep(look_s)


def _gone(folder: Path) -> Any:
    raise ConfigError(f"{folder} is not a run any more")


def _questions(config: TrainConfig) -> list[Questions]:
    """Loads the validation rows of the run as one data set, with the same numbers as in the run."""
    dataset = load_dataset(validation_config(config), default_split="test", section="valid_dataset.", seed=config.seed)
    rows = [{**row, REWARD: row.get(REWARD) or config.reward} for row in dataset[: config.evaluate.max_rows]]
    return [Questions("validation", rows, tuple(row_digest(row, "") for row in rows), config.reward, dataset.readings[0])]


def _base(config: TrainConfig, overrides: Sequence[Any]) -> EvaluationConfig:
    """Returns the evaluation configuration of the run with ``overrides``. Model and data are placeholders."""
    placeholders = [("model", Scalar("a-checkpoint", "a-checkpoint")), ("data", [{"path": Scalar("the-run", "the-run")}])]
    resolved = load_evaluation(None, [*(Assignment((key,), value, "the run") for key, value in placeholders), *overrides])
    for key, source in resolved.sources.items():
        if source == COMMAND_LINE and not key.startswith(FREE):
            free = ", ".join(name + "*" if name.endswith(".") else name for name in FREE)
            raise ConfigError(f"{key} is taken from the run; with --follow only these may be set: {free}")
    overridden = {key.partition(".")[0] for key, source in resolved.sources.items() if source == COMMAND_LINE}
    machine: dict[str, Any] = {} if "dtype" in overridden else {"dtype": config.rollout.dtype}
    machine |= {} if "device" in overridden else {"device": config.device}
    return replace(
        resolved.config,
        reward=config.reward,
        k=(),
        seed=config.seed,
        deterministic=config.deterministic,
        episode_timeout_s=config.rollout.episode_timeout_s,
        **{name: getattr(config, name) for name in SHARED} | {"gconfig": evaluation_gconfig(config)} | machine,
    )
