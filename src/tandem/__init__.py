"""Tandem: reinforcement learning of language models, on a CPU or on GPUs.

`from tandem import …` imports a name of `__all__`, the public names that a script needs. A public name keeps its meaning
within a minor version. All modules below `tandem` are private and may change at any time.

A public name is loaded when it is first used. So `import tandem` is fast and does not import torch.
"""

import ast
import importlib
import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.libraries import set_up

if TYPE_CHECKING:
    from tandem.algorithms.registry import prepared_by
    from tandem.api.engines import EngineWrapper, InferenceEngine, TrainEngine
    from tandem.api.environment import InvalidAction
    from tandem.api.failures import DataFailure, InfrastructureFailure, RewardFailure
    from tandem.api.requests import LLMRequest, LLMResponse
    from tandem.api.weights import WeightSource
    from tandem.api.workflow import (
        FrozenModel,
        Group,
        GroupReward,
        RewardFn,
        RewardResult,
        RolloutWorkflow,
        Sample,
        Score,
        Trajectory,
    )
    from tandem.cli.main import run_script
    from tandem.cli.objects import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer, train
    from tandem.config.errors import ConfigError
    from tandem.config.experiment import SFTConfig, TrainConfig
    from tandem.config.load import load_config
    from tandem.config.preference import PreferenceConfig, RewardModelConfig
    from tandem.engines.train.engine import SpreadEngine
    from tandem.flow.plan import plan_run
    from tandem.launch.launchers import Launcher, LaunchJob
    from tandem.launch.launchers.local import LocalGroup
    from tandem.launch.launchers.slurm import SlurmJob
    from tandem.models.families import ModelFamily
    from tandem.protocol.tool_calls import plain_chat
    from tandem.rewards.build import build_reward
    from tandem.roles.actor import Actor
    from tandem.roles.learners import LanguageModel, PreferenceLearner, RewardModel
    from tandem.rollout.tools.search import SearchBox
    from tandem.rollout.tools.tool import Tool, Toolbox, ToolFailure, tool_schema
    from tandem.rollout.tools.tool_workflow import ToolChatWorkflow
    from tandem.rollout.workflows import ChatWorkflow
    from tandem.tracking.records import load_batch, load_trajectories
    from tandem.tracking.statistics import PhaseTimer, peak_memory_gib
    from tandem.trainers.script import open_training
    from tandem.weights.channel import Delivery, LocalChannel, WeightChannel
    from tandem.weights.disk import DiskChannel
    from tandem.weights.shared_memory import SharedMemoryChannel

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "ChatWorkflow",
    "ConfigError",
    "DPOTrainer",
    "DataFailure",
    "Delivery",
    "DiskChannel",
    "EngineWrapper",
    "FrozenModel",
    "GRPOTrainer",
    "Group",
    "GroupReward",
    "InferenceEngine",
    "InfrastructureFailure",
    "InvalidAction",
    "LLMRequest",
    "LLMResponse",
    "LanguageModel",
    "LaunchJob",
    "Launcher",
    "LocalChannel",
    "LocalGroup",
    "ModelFamily",
    "PhaseTimer",
    "PreferenceConfig",
    "PreferenceLearner",
    "RewardFailure",
    "RewardFn",
    "RewardModel",
    "RewardModelConfig",
    "RewardResult",
    "RewardTrainer",
    "RolloutWorkflow",
    "SFTConfig",
    "SFTTrainer",
    "Sample",
    "Score",
    "SearchBox",
    "SharedMemoryChannel",
    "SlurmJob",
    "SpreadEngine",
    "Tool",
    "ToolChatWorkflow",
    "ToolFailure",
    "Toolbox",
    "TrainConfig",
    "TrainEngine",
    "Trajectory",
    "WeightChannel",
    "WeightSource",
    "build_reward",
    "load_batch",
    "load_config",
    "load_trajectories",
    "open_training",
    "peak_memory_gib",
    "plain_chat",
    "plan_run",
    "prepared_by",
    "run_script",
    "tool_schema",
    "train",
]


def home_of(name: str) -> str:
    """Returns the module of a public name, from the imports above, which are executed only by editors and type checkers."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    block = next(node.body for node in tree.body if isinstance(node, ast.If))
    imports = (node for node in block if isinstance(node, ast.ImportFrom))
    return next(str(node.module) for node in imports if name in {alias.name for alias in node.names})


if not TYPE_CHECKING:  # a type checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Loads and returns a public name.

        Raises:
            AttributeError: there is no such name; the message gives the nearest name.
            ImportError: the same in `from tandem import …`, because Python would replace the message of an AttributeError.
        """
        if name in __all__:
            value = globals()[name] = getattr(importlib.import_module(home_of(name)), name)
            return value
        is_room = not name.startswith("__") and importlib.util.find_spec(f"tandem.{name}") is not None
        if is_room or name.startswith("__"):  # `from tandem import flow` goes on to load the module after this error
            raise AttributeError(f"module 'tandem' has no attribute {name!r}")
        from tandem.config.errors import nearest_names  # noqa: PLC0415 — an import that only an error needs

        words = f"tandem has no public name {name!r}; {nearest_names(name, __all__)}"
        imports = sys._getframe(1).f_code.co_name == "_handle_fromlist"  # Python's own, of `from … import`
        raise ImportError(words, name=__name__) if imports else AttributeError(words)


def __dir__() -> list[str]:
    """Returns the names that are loaded, and all public names."""
    return sorted({*globals(), *__all__})


set_up()  # before anything imports torch
import_module("tandem.algorithms")  # registers the parts whose names the configuration checks; torch waits
