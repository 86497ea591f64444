"""`environment=textarena:ID`: games of TextArena for one player."""

from collections.abc import Mapping
from typing import Any

import textarena

from tandem.api.environment import Environment, StepResult
from tandem.config.errors import ConfigError

OWN_WORDS = textarena.ObservationType.PLAYER_ACTION


class TextArenaGame(Environment):
    """A game without TextArena's wrappers, so that an observation holds only the new text, not the whole history."""

    def __init__(self, id: str, options: dict[str, Any] | None = None):
        """``options``: arguments of `textarena.make`, such as ``{'max_number': 10}``."""
        name = id if id.endswith("-raw") else f"{id.removesuffix('-train')}-raw"
        try:
            self._game = textarena.make(name, **(options or {}))
            self._game.reset(num_players=1, seed=0)
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"environment=textarena:{id} cannot be played here: {str(error).strip().partition(chr(10))[0]}. It must "
                "be a game for one player that downloads nothing, such as GuessTheNumber-v0 or TowerOfHanoi-v0"
            ) from error

    def reset(self, data: Mapping[str, Any], seed: int) -> str:
        """Begins a game and returns the first observation."""
        self._game.reset(num_players=1, seed=seed)
        return self._new_text()

    def step(self, action: Any) -> StepResult:
        """Makes a move. TextArena expects moves in brackets; a reply without brackets is put into them."""
        text = str(action)
        is_over, _ = self._game.step(text if "[" in text else f"[{text}]")
        new_text = self._new_text()
        if not is_over:
            return StepResult(new_text, 0.0, False)
        rewards, infos = self._game.close()
        reward = float(rewards[0])
        return StepResult(new_text or str(infos[0].get("reason", "")), reward, True, False, {"accuracy": float(reward >= 1)})

    def _new_text(self) -> str:
        _, messages = self._game.get_observation()
        return "\n".join(text.strip() for _, text, kind in messages if kind != OWN_WORDS)
