"""`environment=skyrl_gym:NAME`: tasks of SkyRL-gym. A row holds the task's own fields, such as ``reward_spec``."""

from collections.abc import Mapping
from typing import Any

import skyrl_gym

from tandem.api.environment import Environment, StepResult
from tandem.config.errors import ConfigError, nearest_names


class SkyRLTask(Environment):
    """One task. The row's columns are passed as the task's extras; the ground truth is the column ``reward_spec``, or
    without it the row's answer."""

    def __init__(self, id: str, options: dict[str, Any] | None = None):
        """``options``: the task's ``env_config``."""
        if id not in skyrl_gym.registry:
            raise ConfigError(f"environment=skyrl_gym:{id} is not known; {nearest_names(id, skyrl_gym.registry)}")
        self._id, self._options = id, options or {}
        self._task: Any = None

    def reset(self, data: Mapping[str, Any], seed: int) -> str:
        """Begins the row's task. Returns the text that the task adds to the row's messages."""
        self.close()
        truth = {"reward_spec": {"method": "rule", "ground_truth": data.get("answer")}}
        self._task = skyrl_gym.make(self._id, env_config=self._options, extras=truth | dict(data))
        messages = [dict(message) for message in data["messages"]]
        prompt, _ = self._task.init([dict(message) for message in messages])
        return _text([message for message in prompt if message not in messages])

    def step(self, action: Any) -> StepResult:
        """Sends an action and returns its result."""
        if self._task is None:
            raise RuntimeError("step before reset")
        result = self._task.step(str(action))
        return StepResult(_text(result["observations"]), float(result["reward"]), bool(result["done"]))

    def close(self) -> None:
        """Closes the task."""
        if self._task is not None:
            self._task.close()
            self._task = None


def _text(messages: Any) -> str:
    return "\n".join(str(message["content"]) for message in messages)
