"""`environment=reasoning_gym:NAME`: tasks that reasoning-gym generates from a seed and scores."""

from collections.abc import Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from tandem.api.environment import Environment, StepResult
from tandem.config.errors import ConfigError, nearest_names

RIGHT = 0.99


class ReasoningTask(Environment):
    """One task an episode. The rewards of its turns add up to the best score among the tries."""

    def __init__(self, id: str, options: dict[str, Any] | None = None, tries: int = 1):
        """``options``: options of the task family, such as ``{'max_terms': 4}``. ``tries``: maximum number of answers."""
        if id not in DATASETS:
            raise ConfigError(f"environment=reasoning_gym:{id} is not known; {nearest_names(id, DATASETS)}")
        if tries < 1:
            raise ConfigError(f"environment=reasoning_gym: tries must be at least 1, got {tries}")
        self._id, self._options, self._tries = id, options or {}, tries
        self._tasks, self._task = self._make(0)
        self._left, self._best = 0, 0.0

    def reset(self, data: Mapping[str, Any], seed: int) -> str:
        """Generates the task for this seed and returns its question."""
        self._tasks, self._task = self._make(seed)
        self._left, self._best = self._tries, 0.0
        return str(self._task["question"])

    def step(self, action: Any) -> StepResult:
        """Scores an answer. Its reward is the improvement over the best score so far."""
        if self._left == 0:
            raise RuntimeError("step before reset")
        score = float(self._tasks.score_answer(str(action), self._task))
        earned, self._best, self._left = max(0.0, score - self._best), max(score, self._best), self._left - 1
        is_right = score >= RIGHT
        if is_right:
            self._left = 0
        words = "That is right." if is_right else "That is not right." + (" Try again." if self._left else "")
        return StepResult(words, earned, self._left == 0, False, {"accuracy": float(is_right)})

    def _make(self, seed: int) -> tuple[Any, Any]:
        try:
            tasks = reasoning_gym.create_dataset(self._id, seed=seed, size=1, **self._options)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"environment=reasoning_gym:{self._id} cannot be made with {self._options}: {error}"
            ) from error
        return tasks, tasks[0]
