"""Models that are the same but for heads and adapters: one copy in memory, and the same numbers."""

import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.api.failures import WeightsChanged
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import RewardModelConfig
from tandem.flow.draw import text
from tandem.flow.plan import plan_run
from tandem.flow.process import Process
from tandem.flow.residency import Residency
from tandem.flow.residents import open_model, open_scores
from tandem.flow.sleep_plan import GIB, Part, moved_bytes, sleep_plan_here
from tandem.models.tokenizer import load_tokenizer
from tandem.tracking.statistics import PhaseTimer
from tandem.trainers import recipes
from tandem.trainers.loop import train
from tests.engines_train.adapters import lora_on
from tests.engines_train.steps import random_batch
from tests.tiny import tiny_model_folder
from tests.trainers.colocated import keys_of, outcome, rows

NAMES = ("helpful", "harmless", "brief", "polite")
TRUNK = "model.model."


def adapted_judge(base, folder, seed, **engine):
    """A reward model as `tandem reward` saves it: merged, with its adapter beside."""
    judge = lora_on(base, head="scalar", **engine)
    generator = torch.Generator().manual_seed(seed)
    state = judge.state_dict()
    masters = {n: 0.1 * torch.randn(m.shape, generator=generator) for n, m in state["masters"].items()}
    judge.load_state_dict(state | {"masters": masters})
    judge.save(folder)
    load_tokenizer(base).save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy, and four reward models that are adapters on it."""
    folder = tmp_path_factory.mktemp("shared")
    tiny_model_folder(folder).rename(folder / "policy")
    for seed, name in enumerate(NAMES, 1):
        adapted_judge(folder / "policy", folder / f"{name}-judge", seed)
    return folder


def config_of(root, models, *more, names=NAMES):
    return load_config(TrainConfig, None, keys_of(root, models, names, *more))


def opened(config):
    """All models of a run with a training engine, as a run opens them."""
    plan = plan_run(config)
    residency = Residency(None, None, PhaseTimer(), open_model)
    process = Process("cpu", 1)
    return {
        resident.name: residency.open(resident, process)
        for resident in plan.residents
        if resident.engine is not None and resident.base_of is None
    }


def places(engine):
    """Where the weights are that models may share."""
    return {n: p.data_ptr() for n, p in engine.model.named_parameters() if n.startswith(TRUNK) and "lora_" not in n}


def kept(*engines):
    return sum(engine.num_bytes()["parameters"] for engine in engines)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_reward_models_that_are_adapters_on_one_base_are_in_memory_once(tmp_path, dtype):
    wide = {"hidden_size": 64, "intermediate_size": 256}
    tiny_model_folder(tmp_path, **wide).rename(tmp_path / "policy")
    for seed, name in enumerate(NAMES, 1):
        adapted_judge(tmp_path / "policy", tmp_path / f"{name}-judge", seed, rank=1)
    keys = ("algorithm=grpo", "algorithm.kl.coefficient=0", f"actor.dtype={dtype}")
    config = config_of(tmp_path, tmp_path, *keys).config
    judges = [engine for name, engine in opened(config).items() if name in NAMES]
    assert len({tuple(places(judge).items()) for judge in judges}) == 1
    assert kept(*judges) <= 1.2 * kept(judges[0])
    batch = random_batch((3, 14, 2))
    for name, judge in zip(NAMES, judges, strict=True):
        alone = opened(config_of(tmp_path, tmp_path, *keys, names=[name]).config)[name]
        assert torch.equal(judge.forward(batch).scores, alone.forward(batch).scores)
        assert kept(alone) == pytest.approx(kept(judges[0]))
    scores = [judge.forward(batch).scores for judge in judges]
    assert len({tuple(some.tolist()) for some in scores}) == len(NAMES)


def test_policy_and_critic_with_adapters_and_reward_models_share_one_base(models, tmp_path):
    config = config_of(tmp_path, models, "actor.lora.rank=2", "critic.lora.rank=2").config
    engines = opened(config)
    assert list(engines) == ["actor", "critic", *NAMES]  # the reference is the actor without its adapters
    assert len({tuple(places(engine).items()) for engine in engines.values()}) == 1
    words = text(plan_run(config))
    assert "critic (adapters, trained, on the weights of actor)" in words
    assert "polite (adapters, frozen, on the weights of actor)" in words


def test_a_policy_that_is_trained_as_a_whole_shares_nothing(models, tmp_path):
    engines = opened(config_of(tmp_path, models).config)
    assert len({tuple(places(engines[name]).items()) for name in ("reference", *NAMES)}) == 1
    for name in ("actor", "critic"):
        assert not set(places(engines[name]).values()) & set(places(engines["reference"]).values())


def with_other(folder, judge, name):
    """The reward model with other numbers in one tensor."""
    shutil.copytree(judge, folder, ignore=shutil.ignore_patterns("adapter"))
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_other_heads_on_one_trunk_share_it_and_other_trunks_do_not(models, tmp_path):
    for name, changed in (("head", "score.weight"), ("trunk", "model.norm.weight"), ("same", "score.weight")):
        with_other(tmp_path / f"{name}-judge", models / "polite-judge", changed)
    (tmp_path / "policy").symlink_to(models / "policy")
    plan = plan_run(config_of(tmp_path, tmp_path, names=("same", "head", "trunk")).config)
    shared = {resident.name: resident.trunk_of for resident in plan.residents if resident.trunk_of}
    assert shared == {"head": "same"}


def test_a_trunk_that_changed_since_the_run_was_planned_is_refused(models, tmp_path):
    for name in ("first", "second"):
        with_other(tmp_path / f"{name}-judge", models / "polite-judge", "score.weight")
    (tmp_path / "policy").symlink_to(models / "policy")
    config = config_of(tmp_path, tmp_path, names=("first", "second")).config
    plan, residency = plan_run(config), Residency(None, None, PhaseTimer(), open_model)
    residency.open(plan.resident("first"), Process("cpu", 1))
    shutil.rmtree(tmp_path / "second-judge")
    with_other(tmp_path / "second-judge", models / "polite-judge", "model.norm.weight")
    with pytest.raises(WeightsChanged, match=r"'model\.norm\.weight' in .*second-judge has other numbers"):
        residency.open(plan.resident("second"), Process("cpu", 1))


def test_where_the_base_is_gone_the_merged_reward_model_is_read(models, tmp_path):
    shutil.copytree(models, tmp_path / "models")
    config = tmp_path / "models" / "polite-judge" / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(models), str(tmp_path / "nowhere")))
    plan = plan_run(config_of(tmp_path, tmp_path / "models", names=("polite",)).config)
    assert plan.resident("polite").adapter is None
    merged = opened(config_of(tmp_path, tmp_path / "models", names=("polite",)).config)["polite"]
    apart = opened(config_of(tmp_path, models, names=("polite",)).config)["polite"]
    batch = random_batch((3, 14, 2))
    assert torch.allclose(merged.forward(batch).scores, apart.forward(batch).scores, atol=1e-4)


def test_a_reward_model_on_a_shared_base_reads_by_its_own_folders_chat_template(models, tmp_path):
    shutil.copytree(models, tmp_path / "models")
    judge, policy = load_tokenizer(tmp_path / "models" / "polite-judge"), load_tokenizer(models / "policy")
    judge.chat_template = judge.chat_template.replace("<|im_start|>", "judge this: ")
    judge.save_pretrained(tmp_path / "models" / "polite-judge")
    config = config_of(tmp_path, tmp_path / "models", names=("polite",)).config
    plan, process, residency = plan_run(config), Process("cpu", 1), Residency(None, None, PhaseTimer(), open_model)
    polite = plan.resident("polite")
    assert polite.adapter is not None
    role = open_scores(config, plan, process, policy, residency, {"polite": open_model(polite, process)})["polite"]
    assert role.reader.tokenizer.chat_template == judge.chat_template != policy.chat_template


ADAPTED = ("actor.lora.rank=2", "critic.lora.rank=2")


def planned(config):
    return sleep_plan_here(config, plan_run(config))


def tight(models, *more):
    """A budget that holds the largest stage, and next to nothing else."""
    plan = planned(config_of(models, models, "memory_limit_gib=1", *more).config)
    return f"memory_limit_gib={1.01 * plan.least(plan.largest) / GIB}"


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("more", [pytest.param(ADAPTED, id="adapters"), pytest.param((), id="trained as a whole")])
def test_a_run_whose_shared_weights_sleep_is_to_the_bit_the_run_with_all_awake(models, tmp_path, more):
    more = ("total_train_steps=3", *more)
    awake = train(config_of(tmp_path / "awake", models, *more))
    for names in (NAMES, NAMES[::-1]):
        limited = config_of(tmp_path / names[0], models, tight(models, *more), *more, names=names)
        asleep = train(limited)
        assert outcome(asleep.folder) == outcome(awake.folder)
        moved = moved_bytes(planned(limited.config).steady())
        assert rows(asleep.folder)[-1]["memory/moved_gib"] == pytest.approx(moved / GIB)
        assert moved


def test_bytes_of_a_shared_trunk_are_counted_once(models, tmp_path):
    """Reward models with adapters on the reference, which wakes for all of them."""
    plan = planned(config_of(tmp_path, models, "memory_limit_gib=1").config)
    sizes = {part.resident: cost.num_bytes for part, cost in plan.parts.items() if part.what == "parameters"}
    engines = opened(config_of(tmp_path, models).config)
    assert {name: kept(engine) for name, engine in engines.items()} == sizes
    for name in NAMES:
        assert plan.stage(f"score: {name}").awake == {Part(name, "parameters"), Part("reference", "parameters")}


def test_reward_models_that_the_command_trains_as_adapters_are_used_as_such(models, tmp_path):
    rows_of = [{"prompt": f"Is {n} a number?", "chosen": "yes", "rejected": "no, never"} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of))
    keys = [f"run.root={tmp_path}", f"actor.path={models}/policy", "actor.dtype=float32", "actor.lora.rank=2", "threads=1"]
    keys += [f"train_dataset.path={tmp_path}", "total_train_steps=2", "batch_size=4", "tracking.plot_every_steps=null"]
    judges = [
        recipes.train(load_config(RewardModelConfig, None, [*keys, f"seed={seed}", f"trial_name=judge{seed}"])).checkpoint
        for seed in (1, 2)
    ]
    terms = " + ".join(f"model(path={folder}, name=judge{number})" for number, folder in enumerate(judges))
    scored = train(config_of(tmp_path / "policy", models, f"reward={terms}", "actor.lora.rank=2"))
    shared = {one.name: one.trunk_of for one in plan_run(config_of(tmp_path, models, f"reward={terms}").config).residents}
    assert shared["judge0"] == shared["judge1"] == "reference"
    assert rows(scored.folder)[-1]["rewards/judge0"] != rows(scored.folder)[-1]["rewards/judge1"]


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_that_is_killed_while_shared_weights_sleep_goes_on_to_the_bit(zygote, models, tmp_path):
    more = (tight(models, *ADAPTED), *ADAPTED, "checkpoint.every_steps=1", "total_train_steps=4")
    whole = train(config_of(tmp_path / "whole", models, *more))
    keys = keys_of(tmp_path / "killed", models, NAMES, *more)
    folder = tmp_path / "killed" / "tandem" / "trial"
    status = zygote.call("tests.trainers.colocated:train_and_die", [keys, 30], tmp_path / "log")
    assert status == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert list((folder / "checkpoints").iterdir())  # it had come to a checkpoint
    status = zygote.call("tests.trainers.colocated:train_and_die", [keys, 0], tmp_path / "log")
    assert status == 0, (tmp_path / "log").read_text()
    assert outcome(folder)["saved"] == outcome(whole.folder)["saved"]
    assert outcome(folder)["metrics"] == outcome(whole.folder)["metrics"]
