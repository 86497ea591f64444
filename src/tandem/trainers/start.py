"""Starts a run: checks everything that can be checked before its run folder exists, tries the rewards, opens the folder.

A dry run calls the same functions and stops before the folder.
"""

import asyncio
import contextlib
import logging
import os
import socket
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.api.failures import DataFailure
from tandem.api.weights import WeightVersion
from tandem.api.workflow import Dropped, Group
from tandem.config.arithmetic import (
    evaluates_every,
    first_limit,
    folder_of,
    is_evaluation_due,
    total_steps,
    workflow_of,
)
from tandem.config.data import WHERE
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.fleet import kinds_of
from tandem.config.load import COMMANDS, plain_data, to_yaml
from tandem.config.recipes import recipes_of, sum_of, sums_of
from tandem.config.services import SERVICES
from tandem.engines.inference.check import check_inference_engine, context_of, warn_of_cut
from tandem.evaluation.reward_check import Asker, RewardCall, unfit_rows
from tandem.flow.opening import Rows, open_rows
from tandem.flow.plan import RunPlan
from tandem.flow.process import Process, devices_here, keep_kernels, start_process
from tandem.flow.residents import check_models, check_scores, weights_folder
from tandem.flow.services import EpisodeParts, asked_columns_of, asks_for_reward, check_names, check_rows, make_parts
from tandem.flow.session import Lasting, Models, TrainingSession
from tandem.launch.rank import failed_elsewhere
from tandem.lifecycle.saving import save_if_due
from tandem.models.catalog import describing, resolve
from tandem.models.hardware import choose_device
from tandem.models.tokenizer import check_template_options, load_tokenizer
from tandem.planning.fit import Plan, check_fit, fitting
from tandem.planning.machine import this_machine
from tandem.planning.planned_model import NotCounted
from tandem.rewards.function import WorkerReward
from tandem.rewards.reward import Reward
from tandem.rollout.workflows import chat_of
from tandem.state.existing import run_info
from tandem.state.resuming import Examine, refuse_existing
from tandem.state.run_folder import RunFolder, require_writable
from tandem.tracking.tracker import Tracker

OWN = "tandem."
"""Prefix of the modules of Tandem's own reward functions, which are not tried before the start."""

TOKENS = {"prompt_ids", "completion_ids"}
"""Arguments of reward functions that the sample answers do not have, because no model generated these answers."""

WRONG = "I do not know."


def try_rewards(reward: Reward, rows: Sequence[Mapping[str, Any]]) -> None:
    """Calls the user's reward functions that judge the first row with sample answers. Warns if a function fails on some
    answers, or gives all of them the same value. Functions that need tokens are not tried, nor are async functions and
    classes, whose resources belong to the run's event loop, which does not exist yet.

    Raises:
        ConfigError: a function fails for every answer; the message says where.
    """
    if not rows or unfit_rows(reward, rows[:1]):
        return
    row = rows[0]
    expected = [("the expected answer", str(row["answer"]))] if row.get("answer") else []
    answers = [("an empty answer", ""), ("a wrong answer", WRONG), *expected]
    for name, judge in reward.of(row).single.items():
        if isinstance(judge, WorkerReward) and not (judge.pool.spec.startswith(OWN) or TOKENS & judge.arguments.required):
            asker = Asker(judge, judge.pool.timeout_s)
            with ThreadPoolExecutor(1) as thread:  # in a notebook this thread already runs an event loop
                calls = asker.all_at_once((0, row, label, answer) for label, answer in answers)
                judge_calls(name, thread.submit(asyncio.run, calls).result())


def judge_calls(name: str, calls: Sequence[RewardCall]) -> None:
    """Checks the calls of a reward with sample answers. Warns if some failed, or if all returned the same value.

    Raises:
        ConfigError: every call failed, and none of them failed because of a timeout.
    """
    failed = [call for call in calls if call.failed]
    if len(failed) == len(calls) and not any(call.failed == "reward_timeout" for call in failed):
        raise ConfigError(
            f"the reward fails on the first row for every answer, so nothing would be trained: {failed[-1].words}; "
            "correct it, and see `tandem check-reward`"
        )
    if failed:
        labels, words = ", ".join(call.what for call in failed), failed[0].words
        log.warning("the reward fails on the first row with %s, and such samples are dropped: %s", labels, words)
    elif len(calls) > 2 and len({call.value for call in calls}) == 1:
        log.warning(
            "the reward `%s` gives %g to an empty, a wrong and the expected answer of the first row: nothing can be learned "
            "from a constant reward; see `tandem check-reward`",
            name,
            calls[0].value,
        )


log = logging.getLogger(__name__)

C = TypeVar("C", bound=BaseConfig)

LOOKED_AT = 16
"""Largest number of rows whose prompts are measured. One prompt that fits is enough, since others are dropped when drawn."""

SHOWN = 1600
"""Largest number of characters of the first prompt that are shown."""


@contextmanager
def prepare(config: TrainConfig, plan: RunPlan) -> Iterator[tuple[Rows, EpisodeParts]]:
    """Checks that a run can start on this machine; yields its rows and the objects of its episodes, which are closed when
    the block is left. Downloads no weights from the hub. ``plan``: the run's plan.

    Raises:
        ConfigError: any fault of the rows, the device, the models, the engine or the user's functions.
    """
    check_names(config, plan)
    rows, device, folder = (
        open_rows(config),
        choose_device(config.device, config.actor.backend),
        describing(config.actor.path),
    )
    tokenizer = load_tokenizer(folder, chats=True)
    both = [*rows.train.rows, *rows.valid]
    check_models(plan, device, tokenizer, both)
    check_inference_engine(config.rollout, folder, device)
    if config.runner == "ray":
        from tandem.flow.on_ray import check_pools  # noqa: PLC0415 Ray is an extra

        check_pools(config, plan, device)
    devices_here(config)  # refuses a run that needs more GPUs than this machine has
    check_weights_folder(config)
    check_prompts(config, rows.train.rows, tokenizer, folder)
    check_scores(config, plan, tokenizer)
    check_partner(config, plan, device)
    with contextlib.closing(make_parts(config, plan, tokenizer)) as parts:
        if asks_for_reward(config):
            check_rows(parts.reward, rows.train.rows)
            check_rows(parts.reward, rows.valid)
            if parts.reward.vote is None and is_first_rank():
                try_rewards(parts.reward, rows.train.rows)
        warn_of_idle_recipes(config, both)
        check_cost(config, plan, rows.train.rows)
        yield replace(rows, asked_columns=asked_columns_of(config, parts.reward)), parts


def with_micro_batches(config: C) -> C:
    """Returns the configuration with micro-batches and `gradient_sync` that fit the GPUs of this machine, see `fitting`. If
    the memory of a model cannot be counted, warns and returns the configuration unchanged."""
    device = choose_device(config.device, config.actor.backend)
    if device == "cpu":
        return config
    try:
        actor: Any = fitting(config, this_machine(device=device))  # of the same class as `config.actor`
    except NotCounted as error:
        log.warning("micro-batches are not fitted to the GPU (set actor.max_tokens_per_micro_batch for it): %s", error)
        return config
    return replace(config, actor=actor)


def check_gpus(config: BaseConfig) -> Plan | None:
    """Runs `check_fit` for the GPUs of this machine. Returns None without a check on a CPU, because the system may swap
    memory to disk, and with a warning if the memory of a model cannot be counted."""
    device = choose_device(config.device, config.actor.backend)
    if device == "cpu":
        return None
    try:
        return check_fit(config, this_machine(device=device))
    except NotCounted as error:
        log.warning("the run starts without a check that it fits: %s", error)
        return None


def warn_of_idle_recipes(config: TrainConfig, rows: Sequence[Mapping[str, Any]]) -> None:
    """Warns of recipes that judge no row, whose models would use memory for nothing."""
    if recipes_of(config.reward) is None or config.algorithm.labels == "majority":
        return
    used = {sum_of(row, config.reward) for row in rows}
    for spec in sums_of(config.reward):
        if spec not in used:
            log.warning("no row is judged by the recipe %r of reward.recipes; leave it out, or check reward.by", spec)


def check_cost(config: TrainConfig, plan: RunPlan, rows: Sequence[Mapping[str, Any]]) -> None:
    """Checks that at least one training row is judged by a reward with the cost that the constraint limits.

    Raises:
        ConfigError: no training row is judged by such a reward.
    """
    cost = config.constraint.cost
    costly = {spec for spec, terms in plan.sums.items() if any(term.label == cost for term in terms)}
    if cost is not None and not any(plan.sum_of(row) in costly for row in rows):
        raise ConfigError(
            f"constraint.cost={cost}: no row of train_dataset is judged by a reward with this term, so nothing would be "
            "limited; add it to a recipe that judges rows, or leave constraint out"
        )


def check_partner(config: TrainConfig, plan: RunPlan, device: str) -> None:
    """Checks that an embedded engine can open the model that the workflow talks to.

    Raises:
        ConfigError: the model cannot be opened.
    """
    resident = plan.resident("partner")
    if resident is None:
        return
    assert resident.engine is not None, "the plan gives the partner an engine configuration"
    folder = describing(resident.engine.path)
    load_tokenizer(folder, chats=True)
    check_inference_engine(replace(config.rollout, backend="embedded"), folder, device)


def check_prompts(
    config: TrainConfig, rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Checks that the chat template reads its options, and that one of the first prompts leaves room for an answer in the
    engine's context; prints this prompt. For a user's workflow, which makes prompts itself, only names of options are
    checked.

    Raises:
        ConfigError: none of the first prompts fits; an option has no effect; or the template refuses a prompt.
    """
    rows = rows if workflow_of(config).name in SERVICES["workflow"] else ()
    check_template_options(tokenizer, rows, config.system_prompt, config.chat_template_kwargs)
    room = context_of(config.rollout.engine, folder)
    lengths = []
    for number, row in enumerate(rows[:LOOKED_AT], 1):
        try:
            chat = chat_of(tokenizer, row, config.system_prompt, config.chat_template_kwargs)
        except DataFailure as error:
            where = row.get(WHERE) or f"row {number} of train_dataset"
            raise ConfigError(
                f"{where}: the chat template refuses the prompt: {error.__cause__ or error}; check chat_template_kwargs, "
                "system_prompt and the row"
            ) from error
        lengths.append(len(chat.prompt_ids))
        if lengths[-1] < room:
            warn_of_cut(config.gconfig.max_new_tokens, room, lengths[-1])
            if is_first_rank():
                print(f"The first prompt, {lengths[-1]} tokens:\n{_shortened(chat.prompt)}", flush=True)
            return
    if lengths:
        raise ConfigError(
            f"the first prompt has {lengths[0]} tokens and none of the first {len(lengths)} leaves room for an answer in "
            f"the context of {room}; raise rollout.engine.max_model_len (null: the model's whole context), or use shorter "
            "prompts"
        )


def is_first_rank() -> bool:
    """Tells whether this process prints messages; works before the process group exists."""
    return os.environ.get("RANK", "0") == "0"


def _shortened(text: str) -> str:
    """Returns the text with each line indented, and without its middle if it is long."""
    cut = len(text) - SHOWN
    text = f"{text[: SHOWN // 2]} … ({cut} characters) … {text[-SHOWN // 2 :]}" if cut > 0 else text
    return textwrap.indent(text.rstrip("\n"), "  | ", lambda line: True)


def check_weights_folder(config: TrainConfig) -> None:
    """Checks that the folder from which servers read weights is writable, if the run uses such a folder.

    Raises:
        ConfigError: the folder is not writable; the message says why.
    """
    servers = kinds_of(config.rollout.backend, config.rollout.fleet) - {"embedded"}
    if not config.rollout.weights.uses_folder(servers=bool(servers)):
        return
    folder = weights_folder(config)
    try:
        require_writable(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot hold the weights for the servers: {error.strerror or error}; set rollout.weights.folder to "
            "another folder"
        ) from error


def fetch_weights(plan: RunPlan) -> None:
    """Downloads missing files of the plan's models, before a run folder exists.

    Raises:
        ConfigError: see `resolve`.
    """
    for path in dict.fromkeys(resident.engine.path for resident in plan.residents if resident.engine is not None):
        resolve(path)


@dataclass(frozen=True)
class Run(Generic[C]):
    """A run that has started: its folder is open, and its process is set up. Its session has the models."""

    config: C
    plan: RunPlan
    rows: Rows
    steps: int
    """Number of training steps of the whole run."""

    process: Process
    folder: RunFolder | None
    """The run folder; None on ranks other than 0, like ``tracker``, because only rank 0 writes."""

    tracker: Tracker | None
    id: str
    """The run's unique name for servers that several runs may reach; equal on all ranks."""

    lasting: Lasting | None = None
    """The objects that one session of the run passes to the next; None if the run has only one session."""

    def evaluate_if_due(self, session: TrainingSession, step: int) -> dict[str, float]:
        """Evaluates on the validation rows if `evaluate.every_steps` says so for this step (0: before the first); returns
        the figures by metric name. They may be empty on ranks other than 0. Collective."""
        due = is_evaluation_due(evaluates_every(self.config), step, self.steps)
        figures: dict[str, float] = session.keep("evaluate") if due else {}
        return figures

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group] = (),
        history: Mapping[int, WeightVersion] | None = None,
        batch: TensorDict | None = None,
        dropped: Sequence[Dropped] = (),
    ) -> None:
        """Records a step on rank 0 (`Tracker.log`). Does nothing if ``metrics`` is empty."""
        if self.tracker is not None and metrics:
            self.tracker.log(step, metrics, groups, history, batch, dropped)

    def save_if_due(self, step: int, models: Models) -> None:
        """Saves a checkpoint if the section `checkpoint` says so for this step: the models, without the state for resuming.
        Collective.

        Raises:
            CheckpointFailed: writing failed, and `checkpoint.on_error` does not let training continue.
        """
        save_if_due(
            self.process.team, self.config.checkpoint, self.folder, step, self.steps, models.save, models.save_tokenizer
        )


@contextlib.contextmanager
def start_run(
    config: C,
    rows: Rows,
    plan: RunPlan,
    *,
    recorded: BaseConfig | None = None,
    examine: Examine = refuse_existing,
) -> Iterator[Run[C]]:
    """Sets up this process, downloads missing files of the plan's models, and opens the run folder. Collective.

    ``recorded``: the configuration to record in the folder, if it differs from the one that the run trains by. ``examine``:
    decides whether a run in the folder is resumed (`may_go_on`); by default it is refused.

    Raises:
        ConfigError: see `start_process`, `fetch_weights`, `open_run` and `keep_kernels`.
    """
    process = start_process(config)
    if process.is_main:
        if limit := first_limit(config, len(rows.train)):  # of two limits of the run's length; a dry run prints it
            log.warning("%s", limit)
        for line in rows.reading_lines():
            print(line)
    fetch_weights(plan)
    steps = total_steps(config, len(rows.train))
    with contextlib.ExitStack() as stack:
        folder, tracker = open_run(
            recorded or config, process, stack, steps=steps, examine=examine, notes=rows.reading_lines()
        )
        keep_kernels(config, process, folder)
        name = process.team.share(lambda: "" if folder is None else folder.id)
        with process.team.together():
            check_seen(recorded or config, name)
        yield Run(config, plan, rows, steps, process, folder, tracker, name)


SEEN_S = 90.0
"""Seconds to wait for a file that another machine wrote to a shared disk: an NFS client may cache its absence for 60 s."""


def open_run(
    config: BaseConfig,
    process: Process,
    stack: contextlib.ExitStack,
    *,
    steps: int,
    examine: Examine = refuse_existing,
    notes: Sequence[str] = (),
) -> tuple[RunFolder | None, Tracker | None]:
    """Opens the run folder and its tracker on rank 0; an error there is raised on all ranks. Collective.

    ``examine``: decides whether a run in the folder is resumed (`may_go_on`); by default it is refused. ``notes``: lines for
    the README of the folder.

    Raises:
        ConfigError: the folder holds a run that is not resumed, is not writable, or a sink is not installed.
        OSError: `metrics.jsonl` cannot be written.
    """
    run = tracker = None
    with process.team.together():
        if process.is_main:
            names = config.run.root, config.experiment_name, config.trial_name
            text, command = to_yaml(config), COMMANDS.get(type(config))
            run = stack.enter_context(
                RunFolder.open(*names, config_text=text, seed=config.seed, command=command, examine=examine)
            )
            name = f"{config.experiment_name}/{config.trial_name}"
            tracker = Tracker(
                run.path, config.tracking, total_steps=steps, run_name=name, config_dict=plain_data(config), notes=notes
            )
            # A launcher that ends this rank allows it only a few seconds, so no picture is drawn; the next start draws it.
            stack.callback(lambda: tracker.close(draw=failed_elsewhere() is None))
            print(f"Run folder: {run.path}. Loading {config.actor.path} …", flush=True)
    return run, tracker


def check_seen(config: BaseConfig, run: str, patience_s: float = SEEN_S) -> None:
    """Waits until this machine sees the folder that rank 0 has opened for the run with the id ``run``.

    Raises:
        ConfigError: this machine does not see it within ``patience_s`` seconds.
    """
    path, until = folder_of(config), time.monotonic() + patience_s
    while run_info(path).get("id") != run:
        if time.monotonic() > until:
            raise ConfigError(
                f"{socket.gethostname()} does not see the run folder of rank 0, {path.absolute()}: all machines must see "
                "run.root under the same path, on a disk that they share"
            )
        time.sleep(0.2)
