"""Proof of delivery: honest engines pass, lies are caught, and a missing update or a wrong version is named."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.api.batch import pack
from tandem.api.engines import InferenceEngine
from tandem.api.failures import DeliveryDisproved
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.team import Team
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig, VerifyConfig
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.engines.inference.core import EngineCore
from tandem.engines.train.engine import SpreadEngine
from tandem.models.tokenizer import load_tokenizer
from tandem.proof.verification import Schedule, Scorer, Verifier, beginning, choose
from tandem.trainers.loop import train
from tandem.weights.publisher import VersionArchive, WeightPublisher

NO_VERSION = "Likely cause: unknown, because no kept version fits"
REWARDS = Path(__file__).parent / "small_rewards.py"
TEMPERATURE = 0.7
STEP = 0.02
"""How far one update moves each weight: log-probabilities change by about 0.1."""


class World:
    """A trainer, real engines, and the delivery and proof between them; `learn` moves the weights and publishes."""

    def __init__(self, model, servers=1, keep_kv=False, most=3, dtype="float32"):
        self.dtype = getattr(torch, dtype)
        self.trainer = SpreadEngine(TrainEngineConfig(path=str(model), dtype=dtype), total_steps=0, device="cpu")
        config = EmbeddedEngineConfig(max_running=16, kv_cache_gib=0.02, threads=1, keep_kv_on_update=keep_kv)
        rollout = RolloutConfig(dtype=dtype, engine=config)
        self.engines = [
            build_inference_engine(rollout, folder=model, placement="colocate", threads=1, device="cpu", deterministic=False)
            for _ in range(servers)
        ]
        self.tokenizer = load_tokenizer(model)
        self.archive = VersionArchive(lambda number: True, most)
        self.archive.keep(0, beginning(model, self.trainer))
        self.publisher = WeightPublisher(self.trainer, self.engines, run="t", dtype=self.dtype, archive=self.archive)
        self.answers = []

    @property
    def cores(self):
        return [engine.worker.core for engine in self.engines]

    def verifier(self, tolerance=None, **options):
        scorer = Scorer(self.trainer, self.archive, self.dtype, Team(), rounds=False)
        return Verifier(scorer, VerifyConfig(tolerance=tolerance), self.dtype, **{"trajectories": 64} | options)

    def move(self, step=STEP):
        generator = torch.Generator().manual_seed(self.publisher.version.number)
        named = {n: t + step * torch.randn(t.shape, generator=generator) for n, t in self.trainer.weights()}
        self.trainer.load_weights(named.items())

    def learn(self, step=STEP):
        self.move(step)
        self.publisher.publish()

    def requests(self, tokens=24, count=4):
        gconfig = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, temperature=TEMPERATURE)
        texts = [f"What is {i} + 4?" for i in range(count)]
        prompts = [
            tuple(self.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                                     tokenize=True, return_dict=False))
            for text in texts
        ]  # fmt: skip
        return [
            (i, LLMRequest(prompt, gconfig, NoiseKey(0, group=i, sample=sample)))
            for i, prompt in enumerate(prompts)
            for sample in range(2)
        ]

    def generate(self, engines=None, **options):
        """Two answers to each prompt, the prompts dealt to the engines in turn, as rows."""
        engines = engines or self.engines

        async def all_of_them():
            asked = self.requests(**options)
            answers = [engines[group % len(engines)].agenerate(request) for group, request in asked]
            return [row(group, response) for (group, _), response in zip(asked, await asyncio.gather(*answers), strict=True)]

        return asyncio.run(asyncio.wait_for(all_of_them(), 60))

    def interrupted(self, updates=1, tokens=240):
        """Rows of requests that run while the weights change."""
        (engine,) = self.engines

        async def work():
            asked = self.requests(tokens=tokens, count=2)
            tasks = [asyncio.ensure_future(engine.agenerate(request)) for _, request in asked]
            for number in range(updates):
                while engine.statistics()["generated_tokens"] < (number + 1) * 16 * len(tasks):
                    await asyncio.sleep(0.002)
                await asyncio.to_thread(self.learn)
            return [row(group, response) for (group, _), response in zip(asked, await asyncio.gather(*tasks), strict=True)]

        return asyncio.run(asyncio.wait_for(work(), 60))

    def verify(self, rows, **options):
        return self.verifier(**options).verify(pack(rows), self.publisher.version.number)

    def close(self):
        self.publisher.close()
        for engine in self.engines:
            engine.close()


def row(group, response):
    size, made = len(response.input_ids), len(response.output_ids)
    return {
        "input_ids": torch.tensor(response.input_ids + response.output_ids),
        "loss_mask": torch.tensor([False] * size + [True] * made),
        "rollout_logprobs": torch.tensor([0.0] * size + list(response.logprobs)),
        "versions": torch.tensor([-1] * size + list(response.versions)),
        "temperature": response.temperature,
        "group_id": group,
    }


@pytest.fixture
def world(model):
    world = World(model)
    yield world
    world.close()


def disproved(world, rows, *words, **options):
    before = {name: tensor.clone() for name, tensor in world.trainer.weights()}
    with pytest.raises(DeliveryDisproved) as caught:
        world.verify(rows, **options)
    for word in words:
        assert word in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in world.trainer.weights())  # to the bit
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- honest engines


def test_a_synchronous_run_passes_and_its_gap_is_numeric_alone(world):
    for update in range(3):
        found = world.verify(world.generate())
        assert found["gap/verified"] == 1 and found["gap/unknown"] == 0
        assert found["gap/numeric"] < 1e-4 and found["gap/stale"] == 0
        assert ("gap/update_sigmas" in found) == (update > 0)  # nothing was delivered before the first
        if update:
            assert found["gap/update_sigmas"] > 5 and abs(found["gap/missing_update"]) < 0.05
        world.learn()


def test_an_asynchronous_run_passes_and_what_age_does_is_told_apart(world):
    rows = []
    for _ in range(4):
        rows += world.generate()
        world.learn()
    found = world.verify(rows)  # versions 0 to 3, and the trainer is at 4
    assert found["gap/numeric"] < 1e-4
    assert found["gap/stale"] > 0.02
    assert found["gap/verified"] == 1
    assert abs(found["gap/missing_update"]) < 0.05


def test_trajectories_that_span_updates_pass(world):
    world.learn()
    rows = world.interrupted(updates=2)
    assert all(len(set(row["versions"].tolist())) == 4 for row in rows)  # -1 of the prompt, and three versions
    found = world.verify(rows)
    assert found["gap/verified"] == 1 and found["gap/numeric"] < 1e-4 and found["gap/stale"] > 0.02


def test_keys_that_are_kept_on_purpose_are_not_held_against_the_engine(model):
    world = World(model, keep_kv=True)
    world.learn()
    rows = world.interrupted()
    found = world.verify(rows, keeps_kv=True)
    assert found["gap/numeric"] < 1e-4 and 0.1 < found["gap/unknown"] + found["gap/verified"] <= 1
    assert found["gap/verified"] < 1  # what came after the update
    disproved(world, rows, NO_VERSION, "prefix cache")
    world.close()


def test_tokens_of_versions_that_are_not_kept_are_counted_and_not_judged(model):
    world = World(model, most=1)
    world.learn()
    rows = world.generate()
    for _ in range(3):
        world.learn()
    found = world.verify(rows)  # version 1, and the trainer is at 4
    assert found["gap/verified"] == 0 and found["gap/unknown"] == 1 and "gap/numeric" not in found
    half = world.verify(rows + world.generate())
    assert half["gap/verified"] == half["gap/unknown"] == 0.5 and half["gap/numeric"] < 1e-4
    world.close()


def test_an_unseen_update_is_no_false_alarm_and_ends_a_run_when_missed_twice(world):
    world.learn()
    world.learn(step=1e-5)
    assert world.verify(world.generate(tokens=48))["gap/update_sigmas"] > 5
    rows = world.generate(tokens=48)
    world.learn(step=1e-5)
    for lie in rows:
        lie["versions"] = torch.where(lie["versions"] == 2, 3, lie["versions"])
    schedule = Schedule(VerifyConfig(every_steps=20), eta=0)
    verifier = world.verifier(schedule=schedule)
    assert not schedule.is_due(4) and not schedule.wants(3)

    once = verifier.verify(pack(rows), 3)
    assert once["gap/update_sigmas"] < -5 and once["gap/missing_update"] > 0.9
    assert schedule.is_due(4) and schedule.wants(3)  # the next steps are verified, and what that takes is kept

    with pytest.raises(DeliveryDisproved, match=r"all of the last update .* is missing .*one version too new") as caught:
        verifier.verify(pack(rows), 3)
    assert "is within the tolerance (0.001 in float32), but its direction shows an older version" in str(caught.value)


def test_a_suspicion_ends_after_eight_verifications_that_show_nothing(world):
    world.learn()
    rows = world.generate()
    world.learn(step=1e-6)
    for lie in rows:
        lie["versions"] = torch.where(lie["versions"] == 1, 2, lie["versions"])
    schedule = Schedule(VerifyConfig(every_steps=20), eta=0)
    verifier = world.verifier(schedule=schedule)
    assert verifier.verify(pack(rows), 2)["gap/update_sigmas"] < -5
    generator = torch.Generator().manual_seed(0)
    for count in range(8):
        assert schedule.is_due(4), count
        noise = [1e-3 * torch.randn(len(row["input_ids"]), generator=generator) for row in rows]
        blurred = [row | {"rollout_logprobs": row["rollout_logprobs"] + n} for row, n in zip(rows, noise, strict=True)]
        assert verifier.verify(pack(blurred), 2)["gap/undecided"] == 1
    assert not schedule.is_due(4)


def test_a_suspicion_ends_when_the_next_result_shows_the_update(world):
    world.learn()
    rows = world.generate()
    world.learn(step=1e-5)
    honest = world.generate()
    for lie in rows:
        lie["versions"] = torch.where(lie["versions"] == 1, 2, lie["versions"])
    schedule = Schedule(VerifyConfig(every_steps=20), eta=0)
    verifier = world.verifier(schedule=schedule)
    for _ in range(2):
        assert verifier.verify(pack(rows), 2)["gap/update_sigmas"] < -5 and schedule.is_due(4)
        assert verifier.verify(pack(honest), 2)["gap/update_sigmas"] > 5 and not schedule.is_due(4)


# ---------------------------------------------------------------------------------------------- lies


def never_applies(core):
    """The engine says that it switched, and goes on with what it had."""

    def swap(staged, version, keep_kv=False):
        core.version = version
        return {"pause_s": 0.0, "recompute_s": 0.0}

    core.swap = swap


def test_an_update_that_is_never_applied_is_named(world):
    never_applies(world.cores[0])
    world.learn()
    world.learn()
    rows = world.generate()
    assert world.engines[0].version.number == 2
    disproved(world, rows, "from version 0: no later update was applied", "tolerance 0.001 in float32")


def test_updates_that_stop_being_applied_are_named_with_the_last_one_that_was(world):
    world.learn()
    never_applies(world.cores[0])
    world.learn()
    world.learn()
    disproved(world, world.generate(), "all of them are from version 1: no later update was applied")


def test_one_stale_tensor_on_one_of_two_servers_is_caught_and_told_from_the_other(model):
    world = World(model, servers=2)
    world.learn()
    name = "model.layers.1.mlp.down_proj.weight"
    real, old = world.cores[1].stage, {n: t.clone() for n, t in world.trainer.weights()}
    world.cores[1].stage = lambda named: real((n, old[n] if n == name else t) for n, t in named)
    world.learn()
    assert len({engine.version for engine in world.engines}) == 1
    assert world.engines[1].version.digest == world.publisher.version.digest  # the server itself notices nothing
    disproved(world, world.generate(), "only 2 of 4 prompts", "one of several", "no kept version fits")
    world.close()


def test_a_server_of_two_that_lacks_an_update_is_told_from_the_other(model):
    world = World(model, servers=2)
    world.learn()
    never_applies(world.cores[0])
    world.learn()
    world.learn()
    disproved(world, world.generate(), "only 2 of 4 prompts", "from version 1: no later update was applied")
    world.close()


class Between(InferenceEngine):
    """Stands before a real engine and changes what goes in or comes out; everything else is the engine's."""

    def __init__(self, engine, question=lambda request: request, answer=lambda request, response: response):
        self.engine, self.question, self.answer = engine, question, answer

    async def agenerate(self, request):
        return self.answer(request, await self.engine.agenerate(self.question(request)))

    @property
    def version(self):
        return self.engine.version

    @property
    def capabilities(self):
        return self.engine.capabilities

    def _same(name):
        return lambda self, *arguments: getattr(self.engine, name)(*arguments)

    prepare_weights, commit_weights, discard_weights = map(_same, ("prepare_weights", "commit_weights", "discard_weights"))
    pause, resume, sleep, wake = map(_same, ("pause", "resume", "sleep", "wake"))
    statistics, close = map(_same, ("statistics", "close"))


def test_another_temperature_is_caught_and_no_version_is_blamed(world):
    world.learn()
    server = Between(
        world.engines[0],
        lambda request: replace(request, gconfig=replace(request.gconfig, temperature=1.0)),
        lambda request, response: replace(response, temperature=request.gconfig.temperature),
    )
    disproved(world, world.generate([server]), NO_VERSION, "model folder, tokenizer and temperature")


def test_another_beginning_of_the_prompt_is_caught_and_no_version_is_blamed(world):
    world.learn()
    server = Between(
        world.engines[0],
        lambda request: replace(request, input_ids=(world.tokenizer.bos_token_id, *request.input_ids)),
        lambda request, response: replace(response, input_ids=request.input_ids),
    )
    disproved(world, world.generate([server]), NO_VERSION)


def test_a_version_that_is_stamped_one_too_new_is_named(world):
    world.learn()
    rows = world.generate()
    world.learn()
    rows += world.generate()
    world.learn()
    ahead = [lie | {"versions": torch.where(lie["versions"] >= 0, lie["versions"] + 1, -1)} for lie in rows]
    disproved(world, ahead, "one version too new: those of 2 to 3 are from the version before")
    assert world.verify(rows)["gap/numeric"] < 1e-4


def test_a_token_that_is_newer_than_it_says_is_named(world):
    world.learn()
    world.learn()
    rows = world.generate()
    late = [lie | {"versions": torch.where(lie["versions"] >= 0, 1, -1)} for lie in rows]
    disproved(world, late, "from version 2, newer than recorded")


# ---------------------------------------------------------------------------------------------- when, what, and in a run


def test_what_is_chosen_is_of_as_many_prompts_as_possible_and_not_always_the_same():
    rows = [
        {
            "input_ids": torch.arange(4),
            "loss_mask": torch.tensor([0, 0, 1, 1 - empty]).bool() & (not empty),
            "group_id": group,
        }
        for group in range(4)
        for empty in (0, 0, 0, 1)
    ]
    batch = pack(rows)
    chosen = [choose(batch, 6, seed).tolist() for seed in range(8)]
    assert len({tuple(indices) for indices in chosen}) > 1
    for indices in chosen:
        assert len(indices) == 6 and indices == sorted(indices) and all(i % 4 != 3 for i in indices)
        assert {batch["group_id"][i].item() for i in indices} == {0, 1, 2, 3}
    assert choose(batch, 99, 0).tolist() == [i for i in range(16) if i % 4 != 3]


def test_steps_1_and_3_and_then_every_so_many_are_due_and_what_they_need_is_kept():
    def schedule(every_steps, eta):
        return Schedule(VerifyConfig(every_steps=every_steps), eta)

    assert [step for step in range(1, 50) if schedule(20, 0).is_due(step)] == [1, 3, 20, 40]
    assert [n for n in range(50) if schedule(20, 0).wants(n)] == [1, 18, 38]  # step 20 trains version 19
    assert [n for n in range(50) if schedule(20, 2).wants(n)] == [0, 1, 17, 18, 37, 38]
    assert not any(schedule(None, 4).is_due(step) or schedule(None, 4).wants(step) for step in range(50))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trainer_computes_with_other_weights_for_a_while_and_is_itself_again(model, tmp_path, dtype):
    def engine():
        return SpreadEngine(TrainEngineConfig(path=str(model), dtype=dtype), total_steps=0, device="cpu")

    ours, theirs = engine(), engine()
    theirs.load_weights({n: t + 0.05 for n, t in theirs.weights()}.items())
    batch = pack([{"input_ids": torch.arange(5, 25), "loss_mask": torch.arange(20) > 3, "temperature": 0.7}])
    before, weights = ours.forward(batch).logprobs, {n: t.clone() for n, t in ours.weights()}
    with ours.using(theirs.weights()):
        assert torch.equal(ours.forward(batch).logprobs, theirs.forward(batch).logprobs)
    assert torch.equal(ours.forward(batch).logprobs, before)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in ours.weights())
    with pytest.raises(RuntimeError, match="on the way"), ours.using(theirs.weights()):
        raise RuntimeError("on the way")
    assert torch.equal(ours.forward(batch).logprobs, before)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(["rollout.weights.channel=disk"], marks=pytest.mark.slow),
        pytest.param(
            ["async_training=true", "rollout.max_head_offpolicyness=2", "gconfig.max_new_tokens=32"], marks=pytest.mark.slow
        ),
        pytest.param(
            ["async_training=true", "rollout.weights.channel=disk", "rollout.max_head_offpolicyness=2"],
            marks=[pytest.mark.slow, pytest.mark.invariant],
        ),
        pytest.param(["placement=decoupled", "rollout.weights.channel=collective"], marks=pytest.mark.slow),
        pytest.param(["rollout.dtype=bfloat16"], marks=pytest.mark.slow),
        pytest.param(["gconfig.first_token_temperature=2"], marks=pytest.mark.slow),
    ],
    ids=lambda more: "-".join(item.partition("=")[0].rpartition(".")[2] for item in more) or "plain",
)
def test_a_run_proves_its_deliveries_and_says_so(overrides, tmp_path, more):
    keys = {
        item.partition("=")[0]: item for item in [*overrides, "total_train_steps=5", "rollout.verify.every_steps=2", *more]
    }
    summary = train(load_config(TrainConfig, None, list(keys.values())))
    found = {row["step"]: row for row in rows_of(summary.folder)}
    assert [step for step, row in found.items() if "gap/verified" in row] == [1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        assert found[step]["gap/verified"] > 0.2
        assert found[step]["gap/numeric"] < 0.1
        assert found[step]["memory/kept_versions_gib"] < 1
    assert not (tmp_path / ".weights").exists()


def test_a_run_whose_engine_ignores_its_updates_ends_with_the_cause(overrides, monkeypatch):
    def swap(self, staged, version, keep_kv=False):
        self.version = version
        return {"pause_s": 0.0, "recompute_s": 0.0}

    monkeypatch.setattr(EngineCore, "swap", swap)
    items = [item for item in overrides if not item.startswith("total_train_steps")]
    with pytest.raises(DeliveryDisproved, match="from version 0: no later update was applied"):
        train(load_config(TrainConfig, None, [*items, "total_train_steps=3"]))
