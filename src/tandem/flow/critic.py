"""The critic of a run, where its algorithm asks for values."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.engines import TrainEngine
from tandem.api.team import Team
from tandem.config.errors import ConfigError
from tandem.models.tokenizer import save_classifier_tokenizer, save_tokenizer
from tandem.roles.critic import Critic, SharedCritic
from tandem.state.weight_digests import digests_of

FOLDER = "critic"
"""The critic's folder in a checkpoint, beside the actor's files."""


def check_same_tokens(role: str, path: str, theirs: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase) -> None:
    """Passes if every token of the actor has the same number in the tokenizer of ``role``, which may have more.

    Raises:
        ConfigError: names the first token that differs.
    """
    token = differing_token(theirs, tokenizer)
    if token is not None:
        there, here = theirs.get_vocab().get(token, "missing"), tokenizer.get_vocab()[token]
        raise ConfigError(
            f"{role}.path={path} has another tokenizer than the actor: {token!r} is {there} "
            f"there and {here} here; use a {role} of the same model family, or leave {role}.path out"
        )


def differing_token(theirs: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase) -> str | None:
    """The first token of ours that has another number in theirs, or none; None if there is no such token."""
    numbers = theirs.get_vocab()
    ordered = sorted(ours.get_vocab().items(), key=lambda item: item[1])
    return next((token for token, number in ordered if numbers.get(token) != number), None)


@dataclass(frozen=True)
class Models:
    """The models of a checkpoint: the actor, and a critic with a model of its own in a folder that is a reward model's."""

    actor: TrainEngine | None
    """The actor's; None where that is in another process."""

    critic: Critic | SharedCritic | None
    tokenizer: PreTrainedTokenizerBase
    is_classifier: bool = False
    """The actor scores texts, and is saved as a sequence classifier."""

    prepare: Callable[[], None] = lambda: None
    """Wakes what is saved. Collective."""

    def save(self, folder: Path) -> None:
        self.prepare()
        if self.actor is not None:
            self.actor.save(folder)
        if isinstance(self.critic, Critic):
            self.critic.engine.save(folder / FOLDER)

    def moved(self) -> dict[str, float]:
        """Implements `TrainEngine.moved` for the actor."""
        return {} if self.actor is None else self.actor.moved()

    def late_writer(self, states: Mapping[str, Any]) -> Callable[[Path], None] | None:
        """A late writer, as `TrainEngine.late_writer` says; ``states``: of all parts of a run (`recovery.parts_of`)."""
        actor = None if self.actor is None else self.actor.late_writer(states["trainer"])
        if not isinstance(self.critic, Critic):
            return actor
        critic = self.critic.engine.late_writer(states["critic"]["engine"])
        if actor is None or critic is None:
            return None

        def write(folder: Path) -> None:
            actor(folder)
            critic(folder / FOLDER)

        return write

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, float32; the critic's as `critic/…`. Collective."""
        yield from () if self.actor is None else self.actor.weights()
        if isinstance(self.critic, Critic):
            yield from ((f"{FOLDER}/{name}", tensor) for name, tensor in self.critic.engine.weights())

    def digests(self, team: Team) -> dict[str, str]:
        """The digests of all weights, on the first rank of the team; empty on the others. Collective."""
        with team.together(), team.whole(self.named_weights()) as stream:
            if team.main:
                return digests_of(stream)
            for _ in stream:
                pass
        return {}

    def save_tokenizer(self, folder: Path) -> None:
        """The tokenizer beside each of them; beside a classifier with the padding that this takes for padding."""
        if self.is_classifier:
            save_classifier_tokenizer(self.tokenizer, folder)
        else:
            save_tokenizer(self.tokenizer, folder)
        if isinstance(self.critic, Critic):
            save_classifier_tokenizer(self.tokenizer, folder / FOLDER)
