"""The table of services of a run (rewards, workflows, sinks, judges, environments, agents, partners, sandboxes, tools), and
the `extend` section.

The table has the names of factories and does not import them. A new service is a new file and a line here; a user's service
needs no line and is named as `my_file.py:Name`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tandem.config.errors import ConfigError, nearest_names
from tandem.config.terms import Spec

if TYPE_CHECKING:
    from tandem.config.experiment import BaseConfig


Kind = Literal["reward", "workflow", "sink", "judge", "environment", "agent", "partner", "sandbox", "tool"]

NAMED = ("judge", "environment", "agent", "partner", "sandbox")
"""Kinds that have a configuration key, and are passed to every factory with an argument of that name."""

GIVEN = (
    "reward",
    "gconfig",
    "tokenizer",
    "system_prompt",
    "chat_template_kwargs",
    "engine",
    "recorder",
    "services",
    "episode_timeout_s",
)
"""Arguments that every workflow may have, besides the services that the configuration names."""


@dataclass(frozen=True)
class Service:
    """One registered service."""

    kind: Kind
    name: str
    factory: str
    """`package.module:name` of a class or function. Arguments with the name of a service are passed; all others are
    knobs."""

    needs_model: bool = False
    """True for a reward that a model held by the run computes (`tandem.api.workflow.Score`)."""

    writes_without: str = ""
    """Name of a knob, for a reward whose model generates text. Without the knob the run itself holds this model; with it,
    the model runs elsewhere."""

    package: str = ""
    """Optional library that the service needs; the extra with the service's name installs it."""


SERVICES: dict[str, dict[str, Service]] = {
    kind: {} for kind in ("reward", "workflow", "sink", "judge", "environment", "agent", "partner", "sandbox", "tool")
}
"""Kind → name → record."""


def register(service: Service) -> None:
    """Adds a service to the table."""
    SERVICES[service.kind][service.name] = service


def service_of(kind: Kind, name: str, key: str = "") -> Service:
    """Returns the registered service of that name. ``key``: configuration key of the name, for the message.

    Raises:
        ConfigError: there is none; the message has the nearest name.
    """
    table = SERVICES[kind]
    if name in table:
        return table[name]
    where = f"{key}: " if key else ""
    if not table:
        raise ConfigError(f"{where}no {kind} is called {name!r}; give one of your own as my_file.py:Name")
    raise ConfigError(f"{where}no {kind} is called {name!r}; {nearest_names(name, table)}, and my_file.py:Name")


for _service in (
    Service("reward", "math", "tandem.rewards.verifiable:MathReward"),
    Service("reward", "exact_number", "tandem.rewards.verifiable:build_exact_number"),
    Service("reward", "format", "tandem.rewards.verifiable:build_format"),
    Service("reward", "gsm8k", "tandem.rewards.verifiable:build_gsm8k"),
    Service("reward", "length", "tandem.rewards.verifiable:build_length"),
    Service("reward", "reasoning_gym", "tandem.rewards.reasoning_gym:build_reasoning_gym"),
    Service("reward", "code", "tandem.rewards.code:CodeReward"),
    Service("reward", "model", "tandem.rewards.model:ModelReward", needs_model=True),
    Service("reward", "judge", "tandem.rewards.judge:JudgeReward", writes_without="url"),
    Service("reward", "compare", "tandem.rewards.group_judges:CompareReward", writes_without="url"),
    Service("reward", "rank", "tandem.rewards.group_judges:RankReward", writes_without="url"),
    Service("reward", "remote", "tandem.rewards.remote:RemoteReward"),
    Service("partner", "model", "tandem.rollout.episode_engine:ModelPartner"),
    Service("sandbox", "auto", "tandem.sandbox.choose:with_what_works"),
    Service("sandbox", "bubblewrap", "tandem.sandbox.choose:with_bubblewrap"),
    Service("sandbox", "landlock", "tandem.sandbox.choose:with_landlock"),
    Service("sandbox", "none", "tandem.sandbox.choose:without_walls"),
    Service("workflow", "rlvr", "tandem.rollout.workflows:RLVRWorkflow"),
    Service("workflow", "program", "tandem.rollout.program:ProgramWorkflow"),
    Service("workflow", "multi_turn", "tandem.rollout.multi_turn:MultiTurnWorkflow"),
    Service("workflow", "tools", "tandem.rollout.tools.tool_workflow:ToolWorkflow"),
    Service("tool", "calculator", "tandem.rollout.tools.calculator:calculator"),
    Service("tool", "python", "tandem.rollout.tools.python:PythonBox"),
    Service("tool", "search", "tandem.rollout.tools.search:SearchBox"),
    Service("tool", "files", "tandem.rollout.tools.files:FilesBox"),
    Service("tool", "mcp", "tandem.rollout.tools.mcp:McpBox", package="mcp"),
    Service("workflow", "verifiers", "tandem.rollout.agents:VerifiersWorkflow"),
    Service("workflow", "environment", "tandem.rollout.environments.environment_workflow:EnvironmentWorkflow"),
    Service("environment", "gymnasium", "tandem.rollout.environments.gymnasium_text:GymnasiumText", package="gymnasium"),
    Service("environment", "textarena", "tandem.rollout.environments.textarena_game:TextArenaGame", package="textarena"),
    Service("environment", "openenv", "tandem.rollout.environments.openenv_client:OpenEnvClient"),
    Service("environment", "skyrl_gym", "tandem.rollout.environments.skyrl_task:SkyRLTask", package="skyrl_gym"),
    Service(
        "environment", "reasoning_gym", "tandem.rollout.environments.reasoning_task:ReasoningTask", package="reasoning_gym"
    ),
    Service("sink", "tensorboard", "tandem.tracking.sinks:TensorBoardSink", package="tensorboard"),
    Service("sink", "wandb", "tandem.tracking.sinks:WandbSink", package="wandb"),
    Service("sink", "prometheus", "tandem.tracking.prometheus:PrometheusSink"),
    Service("sink", "trackio", "tandem.tracking.sinks:TrackioSink", package="trackio"),
):
    register(_service)


@dataclass(frozen=True)
class ExtendConfig:
    """Your own replacements for parts of Tandem, each as `my_file.py:Name` or `my_file.py:Name(knob=1)`
    (docs/extending.md)."""

    train_engine: Spec | None = None
    """Training engine of the actor: a class derived from `TrainEngine`, for example a subclass of `SpreadEngine`."""

    inference_engine: Spec | None = None
    """Inference engine: a class derived from `InferenceEngine`. If its constructor has an argument `engine`, it gets the
    engine of `rollout.backend` and can pass requests on to it. For `tandem train` and `distill`."""

    weight_channel: Spec | None = None
    """Channel that sends new weights to the inference engine: a class derived from `WeightChannel`. For `tandem train` and
    `distill`."""

    step: Spec | None = None
    """The training step: a function `step(run)`. For `tandem train`."""

    model_family: Spec | None = None
    """A family of models that Tandem does not support: a `ModelFamily`."""


def extension_problems(config: "BaseConfig") -> Iterator[str]:
    """Yields a message for each replacement that this kind of run does not use, or that contradicts another key."""
    extend, rollout = config.extend, getattr(config, "rollout", None)
    for name in ("inference_engine", "weight_channel"):
        if getattr(extend, name) and rollout is None:
            yield f"extend.{name} is for runs that generate, and this one learns from rows; leave it out"
    if rollout is None:
        return
    if extend.weight_channel and rollout.weights.channel != "auto":
        yield (
            f"extend.weight_channel={extend.weight_channel} takes the place of rollout.weights.channel="
            f"{rollout.weights.channel}; leave one of them out"
        )
    if extend.inference_engine and rollout.balance is not None:
        yield "rollout.balance moves threads of the embedded engine alone; leave it or extend.inference_engine out"
    for name in ("train_engine", "inference_engine", "weight_channel", "model_family"):
        if getattr(extend, name) and getattr(config, "runner", "local") == "ray":
            yield f"extend.{name} does not go with runner=ray; leave one of them out, or use runner=local"
