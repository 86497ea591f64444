"""Three steps of GRPO, PPO with a critic, DPO and fine-tuning: under every layout those of one process."""

import dataclasses
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from tandem.config.algorithm import Component
from tandem.config.train_engine import ActorConfig, CriticConfig, OptimizerConfig, critic_engine
from tandem.engines.train.engine import SpreadEngine
from tandem.roles.actor import Actor
from tandem.roles.critic import Critic
from tandem.roles.learners import LanguageModel, PreferenceLearner
from tandem.roles.reference import Reference
from tests.engines_train.layouts import backend_of
from tests.engines_train.steps import distance, weights_of
from tests.ranks import alone_and_on
from tests.roles.batches import rollout_batch
from tests.roles.presets import GROUPS, algorithm_of
from tests.roles.test_preference_roles import pair_batch
from tests.tiny import tiny_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.invariant]

LAYOUTS = {
    "1": ("d1",),
    "2": ("d2", "d1t2", "d1c2"),
    "1 zero": ("zero1:d1", "zero2:d1", "zero3:d1"),
    "2 zero": ("zero1:d2", "zero2:d2", "zero3:d2"),
    "4": ("d2t2", "d2c2"),
}
FROZEN = {"d1t2": "d1r2", "d1c2": "d2", "d2t2": "d4", "d2c2": "d1r4", "zero2:d2": "d1r2"}
"""How the reference is spread beside each, where it is not as the actor."""

ZERO = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed, an extra, is not installed")

PRESETS = ("grpo", "ppo", "dpo", "sft")
STEPS = 3


def config_of(folder, layout) -> ActorConfig:
    """A step that is nearly proportional to the gradient, so that rounding stays rounding."""
    optimizer = OptimizerConfig(lr=0.05, eps=0.1)
    return ActorConfig(
        path=str(folder), backend=backend_of(layout), dtype="float32", optimizer=optimizer, max_tokens_per_micro_batch=24
    )


def trained(preset: str, folders, layout: str):
    """(engines that learnt, metrics of each step)."""
    config = config_of(folders[0], layout)
    engine = SpreadEngine(config, total_steps=10)
    if preset == "sft":
        model = LanguageModel(engine)
        return [engine], [model.train_lm(rollout_batch(GROUPS, seed=seed)) for seed in range(STEPS)]
    frozen = Reference(SpreadEngine(config_of(folders[1], FROZEN.get(layout, layout)), total_steps=0))
    if preset == "dpo":
        learner = PreferenceLearner(engine, Component("dpo"), reference=frozen)
        batch = learner.compute_reference(pair_batch())
        return [engine], [learner.train_preference(batch) for _ in range(STEPS)]
    algorithm = algorithm_of(preset, "algorithm.kl.coefficient=0.01")
    actor = Actor(engine, algorithm, config, reference=frozen, max_new_tokens=10, max_head_offpolicyness=STEPS)
    critic = None
    if preset == "ppo":
        own = CriticConfig(optimizer=config.optimizer)
        critic = Critic(SpreadEngine(critic_engine(own, config), total_steps=10, head="scalar"), own, actor.config)
    found = []
    for seed in range(STEPS):
        batch = frozen.compute_logprobs(rollout_batch(GROUPS, seed=seed))
        batch = batch if critic is None else critic.compute_values(batch)
        batch = actor.compute_advantages(actor.compute_proximal(batch))
        found.append(actor.ppo_update(batch) | ({} if critic is None else critic.update(batch)))
    return [engine] if critic is None else [engine, critic.engine], found


def everything(folders, kind, ranks):
    """ "layout preset" → weights before and after, metrics."""
    torch.set_num_threads(1)
    found, alone = {}, not dist.is_initialized()
    for layout in LAYOUTS["1" if alone else kind]:
        for preset in PRESETS:
            engines, metrics = trained(preset, folders, layout)
            found[f"{layout} {preset}"] = [weights_of(engine) for engine in engines], metrics
    if alone:
        config = config_of(folders[0], "d1")
        scalar = SpreadEngine(dataclasses.replace(config), total_steps=1, head="scalar")
        found["before"] = [weights_of(SpreadEngine(config, total_steps=1)), weights_of(scalar)]
    return found


@pytest.fixture(scope="module", params=["2", pytest.param("1 zero", marks=ZERO), pytest.param("2 zero", marks=ZERO), "4"])
def runs(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("presets")
    folders = tuple(tiny_model_folder(out, "qwen3", seed=seed) for seed in (0, 1))
    return request.param, *alone_and_on(int(request.param[0]), everything, folders, request.param, out=out)


@pytest.mark.parametrize("preset", PRESETS)
def test_three_steps_are_those_of_one_process(runs, preset):
    kind, alone, ranks = runs
    weights, metrics = alone[f"d1 {preset}"]
    for layout in LAYOUTS[kind]:
        for found in ranks:
            theirs, told = found[f"{layout} {preset}"]
            for before, ours, other in zip(alone["before"], weights, theirs, strict=False):
                moved = distance(before, ours)
                assert moved > 0
                assert distance(ours, other) <= 1e-3 * moved, (layout, distance(ours, other) / moved)
            for one, another in zip(metrics, told, strict=True):
                assert another == pytest.approx(one, rel=5e-3, abs=1e-5), layout
