"""Makes a run's rewards, workflows and services (the objects that these ask for by argument name), once, at start."""

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast, get_args

from transformers import PreTrainedTokenizerBase

from tandem.api.failures import InfrastructureFailure
from tandem.api.plugins import check_coroutine
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.api.services import NOTHING, Services, arguments_of, factory_of
from tandem.api.workflow import GeneratesTokens, ReadsReward, RewardFn, RolloutWorkflow
from tandem.config.arithmetic import evaluation_gconfig, rewards_of, samples_together, workflow_of
from tandem.config.data import SOURCE, WHERE
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.recipes import sums_of
from tandem.config.rollout import GenerationConfig
from tandem.config.services import GIVEN, NAMED
from tandem.engines.inference.check import context_of
from tandem.flow.plan import RunPlan
from tandem.flow.scoring import EpisodeScores
from tandem.models.catalog import describing
from tandem.rewards.build import asked_columns, build_sum, worker_counts
from tandem.rewards.function import most_workers
from tandem.rewards.majority import AnswerOnly, MajorityVote
from tandem.rewards.reward import Judge, Reward, RewardTerm, Sum, read_sum
from tandem.rollout.agents import AGENT_ARGUMENTS, AGENT_KNOBS, AgentWorkflow, FunctionWorkflow, is_agent
from tandem.rollout.groups import Compared, FirstSamples, MajorityLabels, WholeGroup, WithGreedyBaseline
from tandem.rollout.recorder import SessionRecorder
from tandem.rollout.workflows import Repeated
from tandem.tracking.tracker import check_sinks

log = logging.getLogger(__name__)

MOST_ROWS_ASKED = 2000
"""Number of rows of a long data set that rewards check before the start; each takes up to half a millisecond."""

ROWS_SHOWN = 3

SAMPLING = ("temperature", "top_p", "top_k", "min_new_tokens", "stop", "stop_token_ids")


class RunEngine:
    """The argument ``engine`` of services, which are made before the run's inference engine starts.

    Unlike the engine of an episode, it does not set a request's deadline and sampling noise: the caller must.
    """

    def __init__(self) -> None:
        self._engine: GeneratesTokens | None = None

    def start(self, engine: GeneratesTokens | None) -> None:
        """Sets the engine to which requests are sent."""
        self._engine = engine

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Implements `GeneratesTokens.agenerate`.

        Raises:
            InfrastructureFailure: the engine has not started.
        """
        if self._engine is None:
            raise InfrastructureFailure(
                "no_engine", "a service used the engine before the first episode; use it in an episode"
            )
        return await self._engine.agenerate(request)


@dataclass(frozen=True)
class EpisodeParts:
    """Everything that episodes need besides the engine. ``examiner``: the workflow of evaluation. ``models``: the model
    rewards that episodes await."""

    tokenizer: PreTrainedTokenizerBase
    reward: Reward
    workflow: RolloutWorkflow
    examiner: RolloutWorkflow
    services: Services
    models: EpisodeScores

    def close(self) -> None:
        """Closes all objects, in reverse order. Idempotent."""
        self.services.close()


def make_parts(config: TrainConfig, plan: RunPlan, tokenizer: PreTrainedTokenizerBase) -> EpisodeParts:
    """Makes the reward, the workflows and the services of a run. The caller must close the result.

    Raises:
        ConfigError: see `make_reward` and `training_workflow`; or a service that the configuration names is not used.
    """
    services = open_services(config, tokenizer)
    try:
        models = services.keep(EpisodeScores(plan))
        services.add(models.rewards)
        reward = services.keep(make_reward(config, services, models.rewards, plan.sums))
        reward.accepts_partial = reads_reward(config) == "partly"
        if config.evaluate.every_steps:
            for spec in sums_of(config.reward):
                refuse_only_groups(spec, reward.sums[spec])
        workflow = training_workflow(config, plan, services, reward)
        examiner = make_workflow(config, services, reward, evaluation_gconfig(config))
        refuse_unused(config, services)
    except BaseException:
        services.close()
        raise
    return EpisodeParts(tokenizer, reward, workflow, examiner, services, models)


def open_services(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Services:
    """Makes the objects that rewards, workflows and services may ask for by argument name. The caller must close them."""
    named = {name: getattr(config, name) for name in NAMED}
    context = context_of(config.rollout.engine, describing(config.actor.path))
    recorder = SessionRecorder(tokenizer, chat_template_kwargs=config.chat_template_kwargs, context=context)
    services = Services(named, tokenizer=tokenizer, engine=RunEngine(), recorder=recorder, **_settings(config))
    services.keep(recorder)
    return services


def refuse_unused(config: TrainConfig, services: Services) -> None:
    """Checks that every configured service is used; call it after all objects are made.

    Raises:
        ConfigError: no object has asked for one of the services.
    """
    default = TrainConfig()
    name = next((name for name in services.unused() if getattr(config, name) != getattr(default, name)), None)
    if name is not None:
        raise ConfigError(
            f"{name}={getattr(config, name)} is set, and nobody asks for {name!r}: neither the workflow, nor a class of "
            f"a reward, nor another service has an argument of that name; add it, or leave {name} out"
            + ("; workflow=environment asks for it" if name == "environment" else "")
        )


def asked_columns_of(config: TrainConfig, reward: Reward) -> set[str]:
    """Returns the columns that the reward asks for by name; includes ``row`` if the reward or workflow gets whole rows."""
    plain = workflow_of(config).name in ("rlvr", "multi_turn")
    return asked_columns(reward.judges) | (set() if plain else {"row"})


def check_rows(reward: Reward, rows: Sequence[Mapping[str, Any]]) -> None:
    """Checks that the rewards can judge the rows. In a list of `MOST_ROWS_ASKED` rows or more, only evenly spread rows are
    checked. With majority labels no row is checked.

    If only some rows of a data set cannot be judged, they are reported in one warning, and dropped when they are drawn.

    Raises:
        ConfigError: no checked row of a data set can be judged, for example because a column is missing; or any row names an
            unknown reward.
    """
    unfit: dict[str, list[str]] = {}
    num_rows: Counter[str] = Counter()
    every = len(rows) // MOST_ROWS_ASKED + 1
    for number, row in enumerate(rows if reward.vote is None else (), 1):
        source, where = row[SOURCE], row.get(WHERE) or f"row {number}"
        try:
            reward.of(row)
            if source in num_rows and number % every:
                continue
        except ConfigError as error:
            raise ConfigError(f"{where} (data set {source!r}): {error}") from error
        num_rows[source] += 1
        try:
            reward.check_row(row)
        except ConfigError as error:
            unfit.setdefault(source, []).append(f"{where}: {error}")
    for source, reasons in unfit.items():
        if len(reasons) == num_rows[source]:
            raise ConfigError(f"none of {len(reasons)} rows of data set {source!r} can be judged; the first is {reasons[0]}")
    if unfit:
        counts = (f"{len(reasons)} of {num_rows[source]} rows of data set {source!r}" for source, reasons in unfit.items())
        first = "; ".join(words for reasons in unfit.values() for words in reasons[:ROWS_SHOWN])
        log.warning("%s cannot be judged and will be dropped when drawn. The first: %s", ", ".join(counts), first)


def make_reward(
    config: TrainConfig,
    services: Services | None = None,
    awaited: Mapping[str, RewardFn] = NOTHING,
    sums: Mapping[str, Sequence[RewardTerm]] | None = None,
) -> Reward:
    """Makes the run's reward, and the rewards that single data sources name. ``services``: the objects that a user's classes
    may ask for by name. ``awaited``: see `build_sum`. ``sums``: the plan's reward sums; None parses them from ``config``.

    Raises:
        ConfigError: see `build_sum`; or `reward_workers` is set, and no reward runs in worker processes, or each that does
            sets its own number.
    """
    sums = {spec: read_sum(spec) for spec in rewards_of(config)} if sums is None else sums
    make = _maker(config, services, awaited)
    built, vote = {spec: make(spec, terms) for spec, terms in sums.items()}, None
    if config.algorithm.labels == "majority":
        vote = MajorityVote(timeout_s=config.reward_timeout_s, workers=_workers(config))
    reward = Reward(config.reward, built, vote)
    counts = worker_counts(reward.judges)
    if config.reward_workers not in (None, *counts) and vote is None:
        reward.close()
        why = "sets its number of workers itself" if counts else "runs inside the run and has no worker processes"
        raise ConfigError(
            f"reward_workers={config.reward_workers} is not used: reward={config.reward} {why}; leave reward_workers out"
        )
    return reward


def _workers(config: TrainConfig) -> int:
    """Returns the largest number of worker processes for one reward term on this rank."""
    return config.reward_workers or most_workers(samples_together(config, here=True))


def _maker(config: TrainConfig, services: Services | None, awaited: Mapping[str, RewardFn]) -> Callable[..., Sum]:
    """Returns a function that builds a reward sum from its spelling and its terms."""
    return partial(
        build_sum,
        timeout_s=config.reward_timeout_s,
        workers=_workers(config),
        batch=True,
        services=services,
        cost=config.constraint.cost,
        awaited=awaited,
    )


def changed_reward_of(config: TrainConfig, plan: RunPlan, parts: EpisodeParts) -> Reward:
    """Returns the run's reward with a new default, `config.reward`. Judges of unchanged terms are shared with the present
    reward. If a new judge cannot be made, the other new ones are closed. ``plan``: the plan of ``config``.

    Raises:
        ConfigError: see `build_sum`.
    """
    present = parts.reward
    before = present.sums[present.default]
    present_judges = {term.term.spelling: before.judges[term.label] for term in before.terms if term.label in before.judges}
    try:
        default = _maker(config, parts.services, parts.models.rewards)(
            config.reward, plan.sums[config.reward], made=present_judges
        )
    except BaseException:
        close_new(present, present_judges.values())
        raise
    named = {spec: present.sums[spec] for spec in rewards_of(config) if spec != config.reward}
    return Reward(config.reward, {config.reward: default, **named}, present.vote)


def refuse_only_groups(spec: str, reward: Sum) -> None:
    """Checks that at least one term can judge a single sample, as evaluation needs.

    Raises:
        ConfigError: all terms compare the samples of a prompt.
    """
    if all(map(reward.compares, reward.terms)):
        raise ConfigError(
            f"reward={spec} compares the samples of a prompt, and evaluation judges them one by one: add a term such as "
            "0*math, which counts for nothing in training; a run may also leave evaluation out (evaluate.every_steps=null)"
        )


def close_new(present: Reward, judges: Iterable[Judge]) -> None:
    """Closes the judges that the present reward does not use."""
    present_ids = {id(judge) for judge in present.judges}
    for judge in judges:
        if id(judge) not in present_ids:
            judge.close()


def check_names(config: TrainConfig, plan: RunPlan | None = None) -> None:
    """Checks that the workflow and the tracking sinks exist and that their arguments are available. Makes no objects, so it
    can run before rows are read. ``plan``: tells which model rewards the workflow may await; None: it may await none.

    Raises:
        ConfigError: a check fails, or the workflow would ignore a key of the configuration.
    """
    term, awaited = workflow_of(config), () if plan is None else plan.awaited
    make, skip = _workflow_factory(config)
    services, key = Services({name: getattr(config, name) for name in NAMED}), f"workflow={term.name}"
    if is_agent(make):
        knobs, agent_knobs = _knobs_of_agent(make, term.arguments)
        requested, _ = services.check(key, make, knobs, (*GIVEN, *AGENT_ARGUMENTS, *awaited))
        if "partner" in requested:
            raise ConfigError(
                f"{key} is an agent over HTTP and asks for 'partner', which needs the episode's engine; write a workflow "
                "with `async def arun_episode(self, engine, data)` (docs/recipes/two_models.md)"
            )
        requested, _ = services.check(key, AgentWorkflow, agent_knobs, (*GIVEN, "own_agent", "own_arguments"))
    else:
        requested, _ = services.check(key, make, term.arguments, (*GIVEN, *awaited), skip=skip)
    used = {*requested, *(("chat_template_kwargs",) if "recorder" in requested else ())}
    if plan is not None and all(term.label in used.intersection(awaited) for terms in plan.sums.values() for term in terms):
        used.add("reward")  # the workflow asks for every term of the reward
    _refuse_ignored(config, used)
    check_sinks(config.tracking)


def asks_for_reward(config: TrainConfig) -> bool:
    """Tells whether the run's reward judges the samples. An environment gives rewards itself. An agent or a program may do
    so, and then the run's reward is used only if the configuration sets it."""
    make, skip = _workflow_factory(config)
    if is_agent(make) or "recorder" in inspect.signature(make).parameters:
        return config.reward != TrainConfig().reward
    arguments = arguments_of(make, f"workflow={config.workflow}", skip)
    return arguments.open or "reward" in arguments.names


def reads_reward(config: TrainConfig) -> ReadsReward:
    """Returns when episodes read the reward: the workflow's `RolloutWorkflow.reads_reward`.

    Raises:
        ConfigError: the workflow's value is unknown.
    """
    value = getattr(_workflow_factory(config)[0], "reads_reward", RolloutWorkflow.reads_reward)
    if value not in get_args(ReadsReward):
        raise ConfigError(f"workflow={config.workflow}: reads_reward must be one of {get_args(ReadsReward)}, got {value!r}")
    return cast(ReadsReward, value)


def _workflow_factory(config: TrainConfig) -> tuple[Callable[..., Any], int]:
    """Returns the class or coroutine function that `workflow` names, and the number of its arguments that each episode
    passes: 2 for a function (engine, data), else 0.

    Raises:
        ConfigError: it does not exist (the message gives the nearest name), or is neither a class nor a coroutine function.
    """
    name = workflow_of(config).name
    make, key = factory_of("workflow", name, "workflow"), f"workflow={name}"
    if not callable(make) or isinstance(make, RolloutWorkflow):
        kind = "an object of one: name the class itself" if isinstance(make, RolloutWorkflow) else f"a {type(make).__name__}"
        raise ConfigError(f"{key} must be a class of workflows, or `async def episode(engine, data, …)`; it is {kind}")
    if is_agent(make):
        return make, 0
    if not inspect.iscoroutinefunction(make):
        if inspect.isfunction(make) and {"engine", "data"} & set(inspect.signature(make).parameters):
            raise ConfigError(f"{key} has the argument engine or data, so it must run an episode: write `async def`")
        return make, 0
    first = list(inspect.signature(make).parameters.values())[:2]
    if [p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in first] != [True, True]:
        raise ConfigError(
            f"{key} must take (engine, data) first: `async def {make.__name__}(engine, data, …)`; an agent takes "
            f"base_url, api_key and data by name: `async def {make.__name__}(base_url, api_key, data)`"
        )
    return make, 2


def _knobs_of_agent(function: Callable[..., Any], knobs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides the knobs of an agent into those of its function and those of the workflow that runs it."""
    parameters = inspect.signature(function).parameters
    agent_knobs = {name: value for name, value in knobs.items() if name in AGENT_KNOBS and name not in parameters}
    return {name: value for name, value in knobs.items() if name not in agent_knobs}, agent_knobs


def _refuse_ignored(config: TrainConfig, used: Collection[str]) -> None:
    """Refuses configuration keys that reach a workflow through an argument which it does not have. ``used``: its arguments.

    Raises:
        ConfigError: names the key and the missing argument.
    """
    default, sampling = TrainConfig(), GenerationConfig()
    keys = ("system_prompt", "chat_template_kwargs", "reward")
    set_ = [(key, key) for key in keys if getattr(config, key) != getattr(default, key)]
    sources = (*config.train_dataset.sources, *config.valid_dataset.sources)
    set_ += [(f"reward={source.reward} of a source", "reward") for source in sources if source.reward is not None]
    set_ += [(f"gconfig.{n}", "gconfig") for n in SAMPLING if getattr(config.gconfig, n) != getattr(sampling, n)]
    for key, argument in set_:
        if argument not in used:
            how = "add the argument, or" if workflow_of(config).is_file else "so"
            why = " (it computes rewards itself; reward=null unsets a reward from a file)" if argument == "reward" else ""
            raise ConfigError(
                f"{key} is set, but workflow={config.workflow} has no argument {argument!r} to receive it; {how} leave "
                f"{key} out{why}"
            )


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings that a workflow or another service may ask for by name."""
    return {name: getattr(config, name) for name in ("gconfig", "system_prompt")} | {
        "chat_template_kwargs": dict(config.chat_template_kwargs),
        "episode_timeout_s": config.rollout.episode_timeout_s,
    }


def make_workflow(
    config: TrainConfig, services: Services, reward: RewardFn | None, gconfig: GenerationConfig
) -> RolloutWorkflow:
    """Makes the workflow that `workflow` names: a registered one, or a class or function in a file, with its knobs and the
    services that it asks for by name. A function ``async def episode(engine, data, …)`` is a workflow too.

    Raises:
        ConfigError: see `Services.make`; or the class makes an object that is not a workflow.
    """
    term = workflow_of(config)
    make, skip = _workflow_factory(config)
    key, objects = f"workflow={term.name}", _settings(config) | {"reward": reward, "gconfig": gconfig}
    if is_agent(make):
        knobs, agent_knobs = _knobs_of_agent(make, term.arguments)
        available = objects | dict.fromkeys(AGENT_ARGUMENTS)  # filled in by each episode
        objects |= {"own_agent": make, "own_arguments": services.arguments(key, make, knobs, available)}
        return cast(RolloutWorkflow, services.make(key, AgentWorkflow, agent_knobs, objects))
    if skip:
        return FunctionWorkflow(make, services.arguments(key, make, term.arguments, objects, skip=skip))
    workflow = services.make(key, make, term.arguments, objects)
    if not isinstance(workflow, RolloutWorkflow):
        raise ConfigError(
            f"{key} made a {type(workflow).__name__}, which is no workflow; derive the class from tandem.ChatWorkflow, or "
            "from tandem.RolloutWorkflow"
        )
    check_coroutine(key, workflow.arun_episode, "arun_episode(self, engine, data)", None, {})
    check_coroutine(key, workflow.finish_group, "finish_group(self, samples, data)", (), {})
    return workflow


def refuse_comparing(config: TrainConfig, plan: RunPlan, reward: Reward, whole: bool) -> None:
    """If a reward term compares the samples of a prompt, checks that each sample has others to be compared with. ``whole``:
    True if the workflow makes whole groups.

    Raises:
        ConfigError: there is one sample per prompt; or the run has a greedy baseline, which cannot be compared.
    """
    if not any(reward_sum.compares(term) for reward_sum in reward.sums.values() for term in reward_sum.terms):
        return
    why = f"reward={config.reward} has a term that compares the samples of a prompt"
    if plan.greedy_baseline:
        raise ConfigError(
            f"{why}, and the greedy baseline of algorithm.advantage={config.algorithm.advantage.name} is not compared with "
            "other samples; use algorithm.advantage=grpo"
        )
    if not whole and config.gconfig.n_samples < 2:
        raise ConfigError(f"{why}, so gconfig.n_samples must be at least 2, got {config.gconfig.n_samples}")


def refuse_compared_later(config: TrainConfig, plan: RunPlan, reward: Reward) -> None:
    """Checks that no term which compares samples has options or opens the gate of another term. For runs that finish groups
    only after options and gates have been applied to the whole batch.

    Raises:
        ConfigError: such a term has options or opens a gate.
    """
    together = {name for reward_sum in reward.sums.values() for name in reward_sum.together}
    needed = (name for term in plan.later for name in (term.label, term.options.gate_name))
    name = next((name for name in needed if name in together), None)
    if name is not None:
        why = f"workflow={config.workflow}" if config.algorithm.update_samples is None else "algorithm.update_samples"
        raise ConfigError(
            f"reward {name!r} compares the samples of a prompt, and with {why} it does so after options and gates have been "
            "applied: leave normalise, clip and gate of this term out, and let it open no gate"
        )


def refuse_waiting(config: TrainConfig, plan: RunPlan, workflow: RolloutWorkflow) -> None:
    """Checks that samples of a deterministic run cannot deadlock: all samples of a step advance together, so the workflow
    must be able to run all of them at the same time.

    Raises:
        ConfigError: the workflow has fewer places than samples.
    """
    gconfig, places = config.gconfig, workflow.at_once
    gconfig = replace(gconfig, n_samples=gconfig.n_samples + plan.greedy_baseline)
    needed = samples_together(replace(config, gconfig=gconfig), here=True)
    if config.deterministic and places is not None and places < needed:
        raise ConfigError(
            f"workflow_args.workers={places} lets only so many samples run at once, and with deterministic=true all "
            f"{needed} of a step wait for each other: leave workers out, or set it to at least {needed}"
        )


def training_workflow(config: TrainConfig, plan: RunPlan, services: Services, reward: Reward) -> RolloutWorkflow:
    """Makes the workflow of training: the configured workflow, run `n_samples` times for each prompt unless it makes whole
    groups itself, and wrapped as the algorithm needs (majority vote, training on the first samples, greedy baseline).

    Raises:
        ConfigError: see `make_workflow`; or the algorithm needs a greedy baseline, and the workflow makes whole groups.
    """
    algorithm, gconfig, smallest = config.algorithm, config.gconfig, config.rollout.min_group_size
    vote = reward.vote
    judge = reward if vote is None else AnswerOnly()
    workflow = make_workflow(config, services, judge, gconfig)
    refuse_waiting(config, plan, workflow)
    whole = workflow.makes_group
    if vote is not None:
        workflow = MajorityLabels(workflow, vote)
    elif reward.compares:
        workflow = Compared(workflow, reward)
    if algorithm.update_samples is not None:
        workflow = FirstSamples(workflow, algorithm.update_samples)
    refuse_comparing(config, plan, reward, whole)
    if whole and plan.greedy_baseline:
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage.name} compares with a greedy answer of one sample, and "
            f"workflow={config.workflow} makes a whole group; use algorithm.advantage=grpo, or a workflow of one sample"
        )
    later = bool(plan.later) and (workflow.reads_scores or algorithm.update_samples is not None)
    if later:
        refuse_compared_later(config, plan, reward)
    group = (
        WholeGroup(workflow, smallest, finish_later=later)
        if whole
        else Repeated(workflow, gconfig.n_samples, min_group_size=smallest, finish_later=later)
    )
    if not plan.greedy_baseline:
        return group
    greedy = replace(gconfig, greedy=True, first_token_temperature=None)
    return WithGreedyBaseline(group, make_workflow(config, services, judge, greedy))
