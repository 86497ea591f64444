"""The critic of a run, where its algorithm asks for values."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.algorithms.registry import ADVANTAGES
from tandem.api.engines import TrainEngine
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.roles import CriticConfig, critic_engine_config
from tandem.engines.train.build import Head, build_train_engine
from tandem.models.catalog import describing
from tandem.models.tokenizer import load_tokenizer, save_classifier_tokenizer
from tandem.roles.components import choose
from tandem.roles.critic import Critic, SharedCritic
from tandem.trainers.parts import backend_key
from tandem.trainers.process import Process

FOLDER = "critic"
"""Where the critic lies in a checkpoint, beside the actor's files."""


def needs_critic(config: TrainConfig) -> bool:
    """Whether the advantage, registered or of a file, asks for values.

    Raises:
        ConfigError: it does not, and `critic` was configured.
    """
    choice = choose(ADVANTAGES, config.algorithm.advantage, "algorithm.advantage", {"max_tokens": 1})
    asks = "values" in choice.asked
    if not asks and config.critic != CriticConfig():
        raise ConfigError(
            f"critic.* is not used, because algorithm.advantage={choice.name} asks for no values; use algorithm=ppo, or "
            "leave the critic's keys out"
        )
    return asks


def actor_head(config: TrainConfig) -> Head:
    """The heads of the actor's model."""
    return "both" if config.critic.shared else "lm"


def make_critic(
    config: TrainConfig, process: Process, actor: TrainEngine, steps: int, tokenizer: PreTrainedTokenizerBase
) -> Critic | SharedCritic | None:
    """The critic; None where no part of the algorithm asks for values. ``actor``: its engine, which has both heads where
    `critic.shared` is set (`actor_head`). ``steps``: of the run.

    Raises:
        ConfigError: its model cannot be opened, has more than one label, or reads other tokens than the actor writes.
    """
    if not needs_critic(config):
        return None
    critic = config.critic
    if critic.shared:
        return SharedCritic(actor, critic)
    if critic.path is not None:
        check_same_tokens(critic.path, tokenizer)
    updates = (critic.mini_batches or config.actor.mini_batches) * (critic.epochs_per_batch or config.actor.epochs_per_batch)
    engine = build_train_engine(
        critic_engine_config(config.actor, critic),
        total_steps=steps * updates,
        device=process.device,
        head="scalar",
        key=backend_key(config, "critic"),
    )
    return Critic(engine, critic, config.actor, seed=config.seed)


def check_same_tokens(path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Passes if every token of the actor has the same number in the critic's tokenizer, which may have more.

    Raises:
        ConfigError: names a token that differs.
    """
    theirs = load_tokenizer(describing(path)).get_vocab()
    for token, number in tokenizer.get_vocab().items():
        if theirs.get(token) != number:
            raise ConfigError(
                f"critic.path={path} has another tokenizer than the actor: {token!r} is {theirs.get(token, 'missing')} "
                f"there and {number} here; use a critic of the same model family, or leave critic.path out"
            )


@dataclass(frozen=True)
class Models:
    """What a checkpoint holds: the actor, and a critic with a model of its own in a folder that is a reward model's."""

    actor: TrainEngine
    critic: Critic | SharedCritic | None
    tokenizer: PreTrainedTokenizerBase

    def save(self, folder: Path) -> None:
        """See `TrainEngine.save`."""
        self.actor.save(folder)
        if isinstance(self.critic, Critic):
            self.critic.engine.save(folder / FOLDER)

    def late_writer(self, states: Mapping[str, Any]) -> Callable[[Path], None] | None:
        """See `TrainEngine.late_writer`; ``states``: of all parts of a run (`recovery.parts_of_session`)."""
        actor = self.actor.late_writer(states["trainer"])
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
        yield from self.actor.weights()
        if isinstance(self.critic, Critic):
            yield from ((f"{FOLDER}/{name}", tensor) for name, tensor in self.critic.engine.weights())

    def save_tokenizer(self, folder: Path) -> None:
        """The tokenizer beside each of them."""
        self.tokenizer.save_pretrained(folder)
        if isinstance(self.critic, Critic):
            save_classifier_tokenizer(self.tokenizer, folder / FOLDER)
