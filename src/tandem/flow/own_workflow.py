"""What a user's workflow is given: read from its signature at start, so that nothing is missing and nothing is ignored."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tandem.api.workflow import RolloutWorkflow
from tandem.config.arithmetic import workflow_of
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.generation import GenerationConfig
from tandem.config.nearest import nearest_names

AVAILABLE = ("reward", "gconfig", "tokenizer", "system_prompt", "chat_template_kwargs")
"""Arguments that a workflow's constructor, or a workflow that is a function, may ask for by name."""

SAMPLING = ("temperature", "top_p", "top_k", "min_new_tokens", "stop", "stop_token_ids")


class FunctionWorkflow(RolloutWorkflow):
    """A coroutine function ``episode(engine, data, …)`` as a workflow; ``episode.makes_group = True`` counts too."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]):
        self.function, self.arguments = function, arguments
        self.name = getattr(function, "__name__", "function")
        self.makes_group = bool(getattr(function, "makes_group", False))
        if getattr(function, "reads_scores", False):
            raise ConfigError(
                f"{self.name} is a function, which has no finish_group to read scores in: leave reads_scores out"
            )

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> Any:
        """See `RolloutWorkflow`."""
        return await self.function(engine, data, **self.arguments)


def taken_arguments(make: Any, config: TrainConfig) -> tuple[str, ...]:
    """Which of `AVAILABLE` a workflow takes.

    Raises:
        ConfigError: it is no class or function, it needs an argument that nobody has, it has no such knob, or a key of the
            configuration is set that it would ignore.
    """
    knobs = workflow_of(config).knobs
    key = f"workflow={config.workflow}"
    if not callable(make) or isinstance(make, RolloutWorkflow):
        what = "an object of one: name the class itself" if isinstance(make, RolloutWorkflow) else f"a {type(make).__name__}"
        raise ConfigError(f"{key} must be a class of workflows, or `async def episode(engine, data, …)`; it is {what}")
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):
        raise ConfigError(f"{key} tells nobody which arguments it takes; write a class with an __init__") from None
    if inspect.iscoroutinefunction(make):
        if [p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters[:2]] != [True, True]:
            raise ConfigError(f"{key} must take (engine, data) first: `async def {make.__name__}(engine, data, …)`")
        parameters = parameters[2:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    own = {p.name for p in named} - set(AVAILABLE)
    wrong = next((name for name in knobs if name not in own and (not rest or name in AVAILABLE)), None)
    if wrong is not None:
        there = f"it has: {', '.join(sorted(own))}" if own else "it has none"
        raise ConfigError(f"{key} has no knob {wrong!r}; {nearest_names(wrong, own) if own else there}")
    unknown = [name for name in needed if name not in (*AVAILABLE, *knobs) or name not in {p.name for p in named}]
    if unknown:
        hint = "; a function must be `async def`" if {"engine", "data"} & set(unknown) else ""
        raise ConfigError(
            f"{key} needs the argument {unknown[0]!r}, which nobody gives it{hint}. A workflow is given by name whichever "
            f"it takes of: {', '.join(AVAILABLE)}; give {unknown[0]!r} a default, or set workflow_args.{unknown[0]}"
        )
    taken = AVAILABLE if rest else tuple(name for name in AVAILABLE if name in {p.name for p in named})
    _refuse_ignored(config, taken)
    return taken


def _refuse_ignored(config: TrainConfig, taken: tuple[str, ...]) -> None:
    """Keys that reach a workflow through an argument count only where it takes that argument."""
    default, sampling = TrainConfig(), GenerationConfig()
    keys = {name: name for name in ("system_prompt", "chat_template_kwargs", "reward")}
    set_ = [(key, name) for key, name in keys.items() if getattr(config, key) != getattr(default, key)]
    set_ += [(f"gconfig.{n}", "gconfig") for n in SAMPLING if getattr(config.gconfig, n) != getattr(sampling, n)]
    for key, argument in set_:
        if argument not in taken:
            raise ConfigError(
                f"{key} is set, but workflow={config.workflow} has no argument {argument!r} to be given it; "
                f"add the argument, or leave {key} out"
            )


def checked_workflow(made: Any, config: TrainConfig) -> RolloutWorkflow:
    """What the class or factory gave.

    Raises:
        ConfigError: it is no workflow.
    """
    if not isinstance(made, RolloutWorkflow):
        raise ConfigError(
            f"workflow={config.workflow} made a {type(made).__name__}, which is no workflow; derive the class from "
            "tandem.rollout.workflows.ChatWorkflow, or from tandem.api.workflow.RolloutWorkflow"
        )
    return made
