"""Everything that a start refuses before its run folder exists. A dry run calls the same functions and then stops."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tandem.config.backend import parse_layout
from tandem.config.experiment import TrainConfig
from tandem.config.roles import critic_engine_config
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.inference.check import check_inference_engine
from tandem.engines.train.build import Head
from tandem.engines.train.check import check_train_engine
from tandem.models.catalog import describing, resolve
from tandem.models.lora import refuse_unknown_targets
from tandem.models.precision import resolve_dtype
from tandem.models.tokenizer import check_chat_template, load_tokenizer
from tandem.trainers.critic import actor_head, check_same_tokens, needs_critic
from tandem.trainers.evaluation import evaluation_gconfig
from tandem.trainers.parts import (
    Rows,
    backend_key,
    check_rows,
    make_reward,
    make_workflow,
    reference_config,
    training_workflow,
)
from tandem.trainers.planning.shape import Shape
from tandem.trainers.process import choose_device


class Model(NamedTuple):
    """A model that a run opens for training or scoring."""

    config: TrainEngineConfig
    head: Head = "lm"
    key: str = "actor.backend"
    """Where its layout was written."""


def models_of(config: TrainConfig) -> list[Model]:
    """The models that `tandem train` opens.

    Raises:
        ConfigError: `critic` is configured and nothing asks for values.
    """
    models = [Model(config.actor, actor_head(config))]
    if config.algorithm.kl.coefficient > 0:
        models.append(Model(reference_config(config), key=backend_key(config, "reference")))
    if needs_critic(config) and not config.critic.shared:
        models.append(Model(critic_engine_config(config.actor, config.critic), "scalar", backend_key(config, "critic")))
    return models


def check_start(config: TrainConfig, rows: Rows, others: Sequence[Model] = ()) -> list[Model]:
    """Passes if a run by ``config`` can start on this machine; returns its models. Of a model on the hub no weights are
    downloaded for it. ``others``: models that the run opens beside those of ``config``.

    Raises:
        ConfigError: anything about the device, the models, the engine, the rows or the user's functions.
    """
    device, models = choose_device(config), [*models_of(config), *others]
    folder = describing(config.actor.path)
    tokenizer = load_tokenizer(folder)
    check_chat_template(tokenizer)
    check_models(models, device)
    if config.critic.path is not None and any(model.head == "scalar" for model in models):
        check_same_tokens(config.critic.path, tokenizer)
    check_inference_engine(config.rollout, folder, device)
    reward = make_reward(config)
    try:
        check_rows(reward, rows.train.rows)
        check_rows(reward, rows.valid)
        training_workflow(config, tokenizer, reward)
        make_workflow(config, tokenizer, reward, evaluation_gconfig(config))
    finally:
        reward.close()
    return models


def check_models(models: Sequence[Model], device: str) -> None:
    """Passes if each model can be opened on this device and laid over its ranks.

    Raises:
        ConfigError: see `check_train_engine`; or adapters for matrices that the model does not have.
    """
    for config, head, key in models:
        dtype, layout = resolve_dtype(config.dtype, device), parse_layout(config.backend, key)
        architecture = check_train_engine(config, describing(config.path), layout, torch.device(device), dtype, head, key)
        if config.lora.rank is not None:
            refuse_unknown_targets(config.lora, Shape.of(architecture).linears)


def fetch_weights(models: Sequence[Model]) -> None:
    """Downloads what is still missing of the models, before a run folder exists.

    Raises:
        ConfigError: see `resolve`.
    """
    for path in dict.fromkeys(model.config.path for model in models):
        resolve(path)
