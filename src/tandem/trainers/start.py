"""The start of a run: everything that is refused before its run folder exists, a trial of the rewards, and the folder.

A dry run calls the same functions and stops before the folder.
"""

import asyncio
import contextlib
import logging
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.api.failures import DataFailure
from tandem.api.samples import Dropped, Group
from tandem.api.weights import WeightVersion
from tandem.config.arithmetic import evaluates_every, is_evaluation_due, total_steps, workflow_of
from tandem.config.data import WHERE
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.fleet import kinds_of
from tandem.config.recipes import recipes_of, sum_of, sums_of
from tandem.config.services import SERVICES
from tandem.engines.inference.check import check_inference_engine, context_of, warn_of_cut
from tandem.evaluation.reward_check import Asker, RewardCall, unfit_rows
from tandem.flow.critic import Models
from tandem.flow.delivery import weights_folder
from tandem.flow.parts import Rows, open_rows
from tandem.flow.plan import RunPlan
from tandem.flow.process import Process, choose_device, devices_here, keep_kernels, start_process
from tandem.flow.residents import check_models, check_scores
from tandem.flow.services import EpisodeParts, asked_columns_of, asks_for_reward, check_names, check_rows, make_parts
from tandem.flow.training import Lasting, TrainingSession
from tandem.lifecycle.summary import check_seen, open_run, save_if_due, tell_limit
from tandem.models.catalog import describing, resolve
from tandem.models.template_options import check_template_options
from tandem.models.tokenizer import load_tokenizer
from tandem.planning.fit import check_fit, fitting, memory_here
from tandem.planning.plan import Plan
from tandem.rewards.function import WorkerReward
from tandem.rewards.reward import Reward
from tandem.rollout.chat import chat_of
from tandem.state.resuming import Examine, refuse_existing
from tandem.state.run_folder import RunFolder, require_writable
from tandem.tracking.tracker import Tracker

OWN = "tandem."
"""The beginning of the spellings of Tandem's own functions, which tests have tried."""

TOKENS = {"prompt_ids", "completion_ids"}
"""Arguments that these answers, which no model has made, have not."""

WRONG = "I do not know."


def try_rewards(reward: Reward, rows: Sequence[Mapping[str, Any]]) -> None:
    """Calls the functions that judge the first row, if it can be judged. Warns of one that fails on some answers, and of
    one that gives all of them the same. Functions that ask for tokens are left out, and async ones and classes: what those
    open belongs to the run's event loop, which is not there yet.

    Raises:
        ConfigError: a function fails whatever the answer is; says where in it.
    """
    if not rows or unfit_rows(reward, rows[:1]):
        return
    row = rows[0]
    known = [("the expected answer", str(row["answer"]))] if row.get("answer") else []
    answers = [("an empty answer", ""), ("a wrong answer", WRONG), *known]
    for name, judge in reward.of(row).single.items():
        if isinstance(judge, WorkerReward) and not (judge.pool.spec.startswith(OWN) or TOKENS & set(judge.arguments.names)):
            asker = Asker(judge, judge.pool.timeout_s)
            with ThreadPoolExecutor(1) as aside:  # a notebook has an event loop of its own
                asked = asker.all_at_once((0, row, what, answer) for what, answer in answers)
                judge_calls(name, aside.submit(asyncio.run, asked).result())


def judge_calls(name: str, calls: Sequence[RewardCall]) -> None:
    """Says what the trial of a reward showed.

    Raises:
        ConfigError: every call failed, and none by its deadline.
    """
    failed = [call for call in calls if call.failed]
    if len(failed) == len(calls) and not any(call.failed == "reward_timeout" for call in failed):
        raise ConfigError(
            f"the reward fails on the first row whatever the answer is, so nothing would be trained: {failed[-1].words}; "
            "mend it, and see `tandem check-reward`"
        )
    if failed:
        whose, words = ", ".join(call.what for call in failed), failed[0].words
        log.warning("the reward fails on the first row with %s, and such samples are dropped: %s", whose, words)
    elif len(calls) > 2 and len({call.value for call in calls}) == 1:
        log.warning(
            "reward %s gives %g to an empty, a wrong and the expected answer of the first row alike: nothing can be learnt "
            "from what is always the same; see `tandem check-reward`",
            name,
            calls[0].value,
        )


log = logging.getLogger(__name__)

C = TypeVar("C", bound=BaseConfig)

LOOKED_AT = 16
"""Rows whose prompts are measured at most; one that fits is enough, and the others are dropped when they are drawn."""

SHOWN = 1600
"""Most characters of the first prompt that are shown."""


@contextmanager
def prepare(config: TrainConfig, plan: RunPlan) -> Iterator[tuple[Rows, EpisodeParts]]:
    """The rows and the parts of the episodes of a run that can start on this machine; on leaving the parts are closed.
    ``plan``: the models that it opens.

    Raises:
        ConfigError: see `check_names`, `open_rows` and `check_start`.
    """
    check_names(config, plan)
    rows = open_rows(config)
    parts = check_start(config, rows, plan)
    try:
        yield replace(rows, asked=asked_columns_of(config, parts.reward)), parts
    finally:
        parts.close()


def check_start(config: TrainConfig, rows: Rows, plan: RunPlan) -> EpisodeParts:
    """Passes if a run by ``config`` can start on this machine, and makes what its episodes need. Of a model on the hub no
    weights are downloaded for it. ``plan``: the models that it opens.

    Raises:
        ConfigError: anything about the device, the models, the engine, the rows or the user's functions.
    """
    device = choose_device(config)
    folder = describing(config.actor.path)
    tokenizer = load_tokenizer(folder, chats=True)
    check_models(plan, device, tokenizer, [*rows.train.rows, *rows.valid])
    check_inference_engine(config.rollout, folder, device)
    if config.runner == "ray":
        from tandem.flow.on_ray import check_pools  # noqa: PLC0415 Ray is an extra

        check_pools(config, plan, device)
    devices_here(config)  # more than there are: refused
    check_weights_folder(config)
    check_prompts(config, rows.train.rows, tokenizer, folder)
    check_scores(config, plan, tokenizer)
    check_partner(config, plan, device)
    parts = make_parts(config, plan, tokenizer)
    try:
        if asks_for_reward(config):
            check_rows(parts.reward, rows.train.rows)
            check_rows(parts.reward, rows.valid)
            if parts.reward.vote is None and is_first_rank():
                try_rewards(parts.reward, rows.train.rows)
        warn_of_idle_recipes(config, [*rows.train.rows, *rows.valid])
        check_cost(config, plan, rows.train.rows)
    except BaseException:
        parts.close()
        raise
    return parts


def with_micro_batches(config: C) -> C:
    """The configuration with micro-batches and `gradient_sync` as the GPUs of this machine allow, see `fitting`."""
    device = choose_device(config)
    return config if device == "cpu" else replace(config, actor=fitting(config, memory_here(device)))


def check_gpus(config: BaseConfig) -> Plan | None:
    """`check_fit` for the GPUs of this machine. On a CPU nothing is asked, and nothing returned: the system may swap."""
    device = choose_device(config)
    return None if device == "cpu" else check_fit(config, memory_here(device))


def warn_of_idle_recipes(config: TrainConfig, rows: Sequence[Mapping[str, Any]]) -> None:
    """Warns of recipes that judge no row, whose models are held all the same."""
    if recipes_of(config.reward) is None or config.algorithm.labels == "majority":
        return
    used = {sum_of(row, config.reward) for row in rows}
    for spec in sums_of(config.reward):
        if spec not in used:
            log.warning("no row is judged by the recipe %r of reward.recipes; leave it out, or look at reward.by", spec)


def check_cost(config: TrainConfig, plan: RunPlan, rows: Sequence[Mapping[str, Any]]) -> None:
    """Passes if some row that is trained on can cost what the constraint limits.

    Raises:
        ConfigError: none can.
    """
    cost = config.constraint.cost
    costly = {spec for spec, terms in plan.sums.items() if any(term.label == cost for term in terms)}
    if cost is not None and not any(plan.sum_of(row) in costly for row in rows):
        raise ConfigError(
            f"constraint.cost={cost}: no row of train_dataset is judged by a reward with this term, so nothing would be "
            "limited; add it to a recipe that rows have, or leave constraint out"
        )


def check_partner(config: TrainConfig, plan: RunPlan, device: str) -> None:
    """Passes if the model that the workflow talks to can be had in an engine here.

    Raises:
        ConfigError: it cannot.
    """
    resident = plan.resident("partner")
    if resident is None:
        return
    assert resident.engine is not None, "the plan says how it is opened"
    folder = describing(resident.engine.path)
    load_tokenizer(folder, chats=True)
    check_inference_engine(replace(config.rollout, backend="embedded"), folder, device)


def check_prompts(
    config: TrainConfig, rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Passes if the options for the chat template have an effect, and one of the first prompts leaves room for a token in
    the engine's context; that one is shown as the model gets it. A workflow of the user's makes prompts as it likes: of
    the options only the names are checked.

    Raises:
        ConfigError: none does, and says how long the first one is; an option without effect; a prompt that is refused.
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
                f"{where}: the chat template refuses the prompt: {error.__cause__ or error}; look at chat_template_kwargs, "
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
            f"the context of {room}; make rollout.engine.max_model_len larger (null: all of the model's), or prompts shorter"
        )


def is_first_rank() -> bool:
    """True for the process that speaks, also before the ranks have met."""
    return os.environ.get("RANK", "0") == "0"


def _shortened(text: str) -> str:
    """The text between lines, indented, without its middle if it is long."""
    cut = len(text) - SHOWN
    text = f"{text[: SHOWN // 2]} … ({cut} characters) … {text[-SHOWN // 2 :]}" if cut > 0 else text
    return textwrap.indent(text.rstrip("\n"), "  | ", lambda line: True)


def check_weights_folder(config: TrainConfig) -> None:
    """Passes if the folder from which servers read weights can be written, where the run has one.

    Raises:
        ConfigError: it cannot; says why.
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
    """Downloads what is still missing of the plan's models, before a run folder exists.

    Raises:
        ConfigError: see `resolve`.
    """
    for path in dict.fromkeys(resident.engine.path for resident in plan.residents if resident.engine is not None):
        resolve(path)


@dataclass(frozen=True)
class Run(Generic[C]):
    """A run that has begun: its folder is open, and its process is set up. The models are in its session."""

    config: C
    plan: RunPlan
    rows: Rows
    steps: int
    """Training steps of the whole run."""

    process: Process
    folder: RunFolder | None
    """The run folder; None on ranks other than 0, like the tracker: one rank writes for all."""

    tracker: Tracker | None
    id: str
    """Names the run to servers that several runs may reach; the same on all ranks."""

    lasting: Lasting | None = None
    """The objects that one session of the run leaves to the next; None: there is only one."""

    def evaluate_if_due(self, session: TrainingSession, step: int) -> dict[str, float]:
        """The figures of the validation rows by metric name; empty if `evaluate.every_steps` asks for none at this step
        (0 is before the first), and where ranks other than 0 know none. Collective."""
        due = is_evaluation_due(evaluates_every(self.config), step, self.steps)
        found: dict[str, float] = session.keep("evaluate") if due else {}
        return found

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group] = (),
        history: Mapping[int, WeightVersion] | None = None,
        batch: TensorDict | None = None,
        dropped: Sequence[Dropped] = (),
    ) -> None:
        """Records a step, on rank 0 (`Tracker.log`). Without any metrics nothing is recorded."""
        if self.tracker is not None and metrics:
            self.tracker.log(step, metrics, groups, history, batch, dropped)

    def save_if_due(self, step: int, models: Models) -> None:
        """Saves a checkpoint where `checkpoint` asks for one at this step: the models, without what resuming needs.
        Collective.

        Raises:
            CheckpointFailed: the disk refuses, unless `checkpoint.on_error` lets training go on.
        """
        save_if_due(self.process.team, self.config, self.folder, step, self.steps, models, models.save_tokenizer)


@contextlib.contextmanager
def start_run(
    config: C,
    rows: Rows,
    plan: RunPlan,
    *,
    recorded: BaseConfig | None = None,
    examine: Examine = refuse_existing,
) -> Iterator[Run[C]]:
    """Sets up this process, downloads what is missing of the plan's models, and opens the run folder. Collective.

    ``recorded``: the configuration that the folder tells of, if it is another one than the run trains by. ``examine``: says
    whether a run that is in the folder goes on (`may_go_on`); none does unless it is given.

    Raises:
        ConfigError: see `start_process`, `fetch_weights`, `open_run` and `keep_kernels`.
    """
    process = start_process(config)
    if process.is_main:
        tell_limit(config, len(rows.train))
        for line in rows.told():
            print(line)
    fetch_weights(plan)
    steps = total_steps(config, len(rows.train))
    with contextlib.ExitStack() as stack:
        folder, tracker = open_run(recorded or config, process, stack, steps=steps, examine=examine, notes=rows.told())
        keep_kernels(config, process, folder)
        name = process.team.share(lambda: "" if folder is None else folder.id)
        with process.team.together():
            check_seen(recorded or config, name)
        yield Run(config, plan, rows, steps, process, folder, tracker, name)
