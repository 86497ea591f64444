"""`environment=gymnasium:ID`: gymnasium environments as text. An action is given by its name or number."""

from collections.abc import Mapping
from typing import Any

import gymnasium

from tandem.api.environment import Environment, InvalidAction, StepResult
from tandem.config.errors import ConfigError

FOUR_WAYS = ("left", "down", "right", "up")


class GymnasiumText(Environment):
    """A gymnasium environment with numbered actions. FrozenLake, Taxi, Blackjack and CliffWalking are described in words."""

    def __init__(self, id: str, actions: str | None = None, options: dict[str, Any] | None = None):
        """``actions``: names of the actions in order, such as ``'left right'``. ``options``: arguments of `gymnasium.make`,
        such as ``{'is_slippery': False}``."""
        try:
            self._world = gymnasium.make(id, **(options or {}))
        except (gymnasium.error.Error, TypeError, ModuleNotFoundError) as error:
            raise ConfigError(f"environment=gymnasium:{id} cannot be made: {error}") from error
        space = self._world.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ConfigError(
                f"environment=gymnasium:{id} has the actions {space}, and only numbered actions can be named in text; "
                "write an environment of your own around it (docs/agents_environments.md)"
            )
        family = id.rpartition("/")[2].partition("-v")[0]
        self._first = int(space.start)
        self._say, names = WORDS.get(family, (_plain, ()))
        self._names = actions.split() if actions else list(names) or [str(self._first + i) for i in range(int(space.n))]
        if len(self._names) != space.n:
            raise ConfigError(
                f"environment=gymnasium:{id} has {space.n} actions; actions={actions!r} names {len(self._names)}"
            )

    def reset(self, data: Mapping[str, Any], seed: int) -> str:
        """Begins an episode and returns the first observation with the list of moves."""
        observation, info = self._world.reset(seed=seed)
        self._world.action_space.seed(seed)
        return f"{self._say(self._world, observation, info)}\nYour moves: {', '.join(self._names)}."

    def step(self, action: Any) -> StepResult:
        """Takes the action with this name, in upper or lower case, or this number."""
        word = str(action).strip().strip(".!\"'").lower()
        lower = [name.lower() for name in self._names]
        if word not in lower and word.isdecimal() and 0 <= int(word) - self._first < len(lower):
            word = lower[int(word) - self._first]
        if word not in lower:
            raise InvalidAction(f"That is no move. Your moves: {', '.join(self._names)}.")
        observation, reward, terminated, truncated, info = self._world.step(self._first + lower.index(word))
        return StepResult(self._say(self._world, observation, info), float(reward), terminated, truncated)

    def close(self) -> None:
        """Closes the environment."""
        self._world.close()


def _plain(world: Any, observation: Any, info: Mapping[str, Any]) -> str:
    listed = observation.tolist() if hasattr(observation, "tolist") else observation
    return f"You observe {listed}."


def _frozen_lake(world: Any, observation: int, info: Mapping[str, Any]) -> str:
    ground = [[cell.decode() for cell in row] for row in world.unwrapped.desc]
    row, column = divmod(int(observation), len(ground[0]))
    cell_type = ground[row][column]
    if cell_type in "HG":
        return "You fell into a hole." if cell_type == "H" else "You reached the goal."
    ground[row][column] = "P"
    picture = "\n".join(" ".join("." if cell in "SF" else cell for cell in line) for line in ground)
    return f"{picture}\nP is you, H a hole, G the goal."


def _cliff_walking(world: Any, observation: int, info: Mapping[str, Any]) -> str:
    rows, columns = world.unwrapped.shape
    row, column = divmod(int(observation), columns)
    ground = [["."] * columns for _ in range(rows)]
    ground[-1][1:-1] = ["C"] * (columns - 2)
    ground[-1][-1] = "G"
    ground[row][column] = "P"
    picture = "\n".join(map(" ".join, ground))
    return f"{picture}\nP is you, C the cliff, G the goal."


PLACES = ("the red place", "the green place", "the yellow place", "the blue place", "the taxi")


def _taxi(world: Any, observation: int, info: Mapping[str, Any]) -> str:
    row, column, passenger, goal = world.unwrapped.decode(int(observation))
    corners = [(0, 0), (0, 4), (4, 0), (4, 3)]
    where = ", ".join(f"{PLACES[i][4:-6]} is at row {r}, column {c}" for i, (r, c) in enumerate(corners))
    possible = [name for name, allowed in zip(WORDS["Taxi"][1], info.get("action_mask", [1] * 6), strict=True) if allowed]
    return (
        f"The taxi is at row {row}, column {column}. The passenger is at {PLACES[passenger]} and wants to go to "
        f"{PLACES[goal]}. Places: {where}. Possible now: {', '.join(possible)}."
    )


def _blackjack(world: Any, observation: tuple[int, int, int], info: Mapping[str, Any]) -> str:
    player, dealer, ace = observation
    return f"Your cards sum to {player}{', with an ace that counts 11' if ace else ''}. The dealer shows {dealer}."


WORDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "FrozenLake": (_frozen_lake, FOUR_WAYS),
    "FrozenLake8x8": (_frozen_lake, FOUR_WAYS),
    "CliffWalking": (_cliff_walking, ("up", "right", "down", "left")),
    "Taxi": (_taxi, ("south", "north", "east", "west", "pickup", "dropoff")),
    "Blackjack": (_blackjack, ("stick", "hit")),
}
"""Maps the name of an environment family to a function that describes an observation in words, and to the names of the
actions."""
