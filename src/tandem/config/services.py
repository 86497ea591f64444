"""The services of a run by name: rewards, workflows, sinks, judges, environments, agents, partners, sandboxes
and tools.

The table names factories and imports none of them. A new service is a file and a line here; a user's file gives any of them
as `my_file.py:Name`.
"""

from dataclasses import dataclass
from typing import Literal

from tandem.config.errors import ConfigError, nearest_names

Kind = Literal["reward", "workflow", "sink", "judge", "environment", "agent", "partner", "sandbox", "tool"]

NAMED = ("judge", "environment", "agent", "partner", "sandbox")
"""Kinds that have a key of the configuration, and are given to whoever asks for an argument of that name."""

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
"""Arguments that every workflow may ask for by name, besides the services that the configuration names."""


@dataclass(frozen=True)
class Service:
    """One registered service."""

    kind: Kind
    name: str
    factory: str
    """`package.module:name` of a class or function. It is given what its arguments ask for by name; the rest are knobs."""

    needs_model: bool = False
    """A reward that is scored by a model which the run holds (`tandem.api.scoring.Score`)."""

    writes_without: str = ""
    """The knob without which its model writes in the run itself; with it, elsewhere."""

    package: str = ""
    """The optional library that it needs; the extra of the service's own name installs it."""


SERVICES: dict[str, dict[str, Service]] = {
    kind: {} for kind in ("reward", "workflow", "sink", "judge", "environment", "agent", "partner", "sandbox", "tool")
}
"""Kind → name → record."""


def register(service: Service) -> None:
    """Adds a service to the table."""
    SERVICES[service.kind][service.name] = service


def service_of(kind: Kind, name: str, key: str = "") -> Service:
    """The registered service of that name. ``key``: where it was written, for the message.

    Raises:
        ConfigError: there is none; tells the nearest name.
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
    Service("reward", "code", "tandem.rewards.code.reward:CodeReward"),
    Service("reward", "model", "tandem.rewards.model:ModelReward", needs_model=True),
    Service("reward", "judge", "tandem.rewards.judge:JudgeReward", writes_without="url"),
    Service("reward", "compare", "tandem.rewards.compare:CompareReward", writes_without="url"),
    Service("reward", "rank", "tandem.rewards.compare:RankReward", writes_without="url"),
    Service("reward", "remote", "tandem.rewards.remote:RemoteReward"),
    Service("partner", "model", "tandem.rollout.partner:ModelPartner"),
    Service("sandbox", "auto", "tandem.sandbox.choose:with_what_works"),
    Service("sandbox", "bubblewrap", "tandem.sandbox.choose:with_bubblewrap"),
    Service("sandbox", "landlock", "tandem.sandbox.choose:with_landlock"),
    Service("sandbox", "none", "tandem.sandbox.choose:without_walls"),
    Service("workflow", "rlvr", "tandem.rollout.workflows:RLVRWorkflow"),
    Service("workflow", "program", "tandem.rollout.program:ProgramWorkflow"),
    Service("workflow", "multi_turn", "tandem.rollout.multi_turn:MultiTurnWorkflow"),
    Service("workflow", "tools", "tandem.rollout.tools.workflow:ToolWorkflow"),
    Service("tool", "calculator", "tandem.rollout.tools.calculator:calculator"),
    Service("tool", "python", "tandem.rollout.tools.python:PythonBox"),
    Service("tool", "search", "tandem.rollout.tools.search:SearchBox"),
    Service("tool", "files", "tandem.rollout.tools.files:FilesBox"),
    Service("tool", "mcp", "tandem.rollout.tools.mcp:McpBox", package="mcp"),
    Service("workflow", "verifiers", "tandem.rollout.verifiers_taskset:VerifiersWorkflow"),
    Service("workflow", "environment", "tandem.rollout.environments.workflow:EnvironmentWorkflow"),
    Service("environment", "gymnasium", "tandem.rollout.environments.gymnasium_text:GymnasiumText", package="gymnasium"),
    Service("environment", "textarena", "tandem.rollout.environments.textarena_game:TextArenaGame", package="textarena"),
    Service("environment", "openenv", "tandem.rollout.environments.openenv_client:OpenEnvClient"),
    Service("environment", "skyrl_gym", "tandem.rollout.environments.skyrl_task:SkyRLTask", package="skyrl_gym"),
    Service(
        "environment", "reasoning_gym", "tandem.rollout.environments.reasoning_task:ReasoningTask", package="reasoning_gym"
    ),
    Service("sink", "tensorboard", "tandem.tracking.sinks.tensorboard:TensorBoardSink", package="tensorboard"),
    Service("sink", "wandb", "tandem.tracking.sinks.wandb:WandbSink", package="wandb"),
    Service("sink", "prometheus", "tandem.tracking.sinks.prometheus:PrometheusSink"),
    Service("sink", "trackio", "tandem.tracking.sinks.trackio:TrackioSink", package="trackio"),
):
    register(_service)
