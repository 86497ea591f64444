"""`tandem eval --follow RUN`: the evaluation of a run as a job of its own, beside it (`evaluate.where=job`) or after it.

Consumes checkpoints, as the run writes them; produces `evaluations/step_N/` in the run's folder, and a line of figures for
each in its `evaluations.jsonl`. The figures are those that the run would have measured itself.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.api.lines import append_line
from tandem.config.arithmetic import evaluation_gconfig, is_evaluation_due
from tandem.config.data import REWARD, SOURCE
from tandem.config.errors import ConfigError
from tandem.config.evaluation import EvaluationConfig, load_evaluation
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.services import NAMED
from tandem.config.yaml_file import COMMAND_LINE, Assignment, Scalar
from tandem.data.dataset import load_dataset
from tandem.evaluation.folder import EvaluationFolder
from tandem.evaluation.questions import Questions, row_digest
from tandem.evaluation.run import evaluate_questions
from tandem.evaluation.scores import metrics_of
from tandem.flow.parts import validation_config
from tandem.models.families import use_family
from tandem.state.existing import checkpoints, existing_run, rows_of, status_now, step_of
from tandem.state.export import checkpoint_of
from tandem.state.named import named_run, no_run
from tandem.state.run_folder import take_lock

FIGURES = "evaluations.jsonl"
FREE = ("device", "dtype", "threads", "wave_samples", "engine.")
"""Keys that the job may have otherwise than the run."""

LOOK_S = 2.0
"""Seconds between looks for a new checkpoint."""

FOLLOWED = (
    f"another tandem eval --follow writes {{folder}}: {{who}}. Its figures go into {FIGURES} of the run, so a second is not "
    "needed; stop it first if this one shall go on in its place"
)


def follow(name: str, overrides: Sequence[Any] = (), look_s: float = LOOK_S) -> Iterator[Mapping[str, Any]]:
    """Evaluates the model that the run began with and each checkpoint that is due (`evaluate.every_steps`), once, until the
    run has ended and all are done; gives the figures of each as it is measured, with `step`.

    ``overrides``: ``key=value`` of `EvaluationConfig` about the machine (`FREE`). ``look_s``: seconds between looks.

    Raises:
        ConfigError: there is no such run, it has no evaluation, or a key that only the run may say.
        RunFolderInUse: another process follows the run; says which.
    """
    run = named_run(name)
    if run is None:
        raise ConfigError(no_run(name))
    if run.step is not None:
        raise ConfigError(f"{name}: a run is followed from its beginning; leave @{run.step} out")
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
    EvaluationFolder.check(home, None)  # it can be made
    home.mkdir(exist_ok=True)
    with take_lock(home, FOLLOWED):
        yield from _measured(folder, config, questions, base, look_s)


def _measured(
    folder: Path, config: TrainConfig, questions: Sequence[Questions], base: EvaluationConfig, look_s: float
) -> Iterator[Mapping[str, Any]]:
    every, done = config.evaluate.every_steps, {row.get("step") for row in rows_of(folder / FIGURES)}
    while True:
        status = status_now(existing_run(folder) or _gone(folder))["status"]  # asked first: what ends then has all saved
        there = checkpoints(folder / "checkpoints")
        last = step_of(there[-1]) if there and status not in ("running", "elsewhere") else 0
        due = [step_of(path) for path in there if is_evaluation_due(every, step_of(path), last)]
        for step in [step for step in (0, *due) if step not in done]:
            try:
                model = config.actor.path if step == 0 else str(checkpoint_of(folder, str(step)).absolute())
                label = {"model": model, "out": str(folder / "evaluations"), "label": f"step_{step}"}
                answers = evaluate_questions(replace(base, **label), questions).answers
            except (ConfigError, FileNotFoundError) as error:
                if step == 0 or (folder / "checkpoints" / f"step_{step}").exists():
                    raise
                print(
                    f"step {step}: removed before it was evaluated ({error}); keep more: checkpoint.keep_last",
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
        if status not in ("running", "elsewhere") and checkpoints(folder / "checkpoints") == there:
            return
        time.sleep(look_s)


def _gone(folder: Path) -> Any:
    raise ConfigError(f"{folder} is no run any more")


def _questions(config: TrainConfig) -> list[Questions]:
    """The validation rows of the run, as one data set, numbered as in the run."""
    dataset = load_dataset(validation_config(config), default_split="test", section="valid_dataset.", seed=config.seed)
    rows = [{**row, REWARD: row.get(REWARD) or config.reward} for row in dataset[: config.evaluate.max_rows]]
    return [Questions("validation", rows, tuple(row_digest(row, "") for row in rows), config.reward, dataset.readings[0])]


def _base(config: TrainConfig, overrides: Sequence[Any]) -> EvaluationConfig:
    """The run's evaluation without its model."""
    told = [("model", Scalar("a-checkpoint", "a-checkpoint")), ("data", [{"path": Scalar("the-run", "the-run")}])]
    asked = load_evaluation(None, [*(Assignment((key,), value, "the run") for key, value in told), *overrides])
    for key, source in asked.sources.items():
        if source == COMMAND_LINE and not key.startswith(FREE):
            free = ", ".join(name + "*" if name.endswith(".") else name for name in FREE)
            raise ConfigError(f"{key} is the run's to say; with --follow these may be set: {free}")
    own = {key.partition(".")[0] for key, source in asked.sources.items() if source == COMMAND_LINE}
    machine = {} if "dtype" in own else {"dtype": config.rollout.dtype}
    machine |= {} if "device" in own else {"device": config.device}
    return replace(
        asked.config,
        reward=config.reward,
        reward_timeout_s=config.reward_timeout_s,
        workflow=config.workflow,
        workflow_args=config.workflow_args,
        **{name: getattr(config, name) for name in NAMED},
        system_prompt=config.system_prompt,
        chat_template_kwargs=config.chat_template_kwargs,
        gconfig=evaluation_gconfig(config),
        k=(),
        seed=config.seed,
        deterministic=config.deterministic,
        episode_timeout_s=config.rollout.episode_timeout_s,
        **machine,
    )
