"""Runs in bfloat16, which every CPU computes, if slowly: what rounding does must neither end a run nor hide a lie."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tandem.algorithms.correction import Evidence
from tandem.api.batch import pack, sequence_index
from tandem.api.failures import DeliveryDisproved
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.rollout import VerifyConfig
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.proof.verification import SIGMAS, Schedule
from tandem.trainers.loop import train
from tests.trainers.test_verification import World

EXAMPLES = Path(__file__).parents[2] / "examples"
GSM8K = [
    {"question": f"Ann has {a} apples and buys {b} more. How many?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}
    for a in range(2, 6)
    for b in range(2, 6)
]


@pytest.fixture
def small(model, tmp_path):
    """Keys that make an example small and compute in bfloat16."""
    return [
        f"run.root={tmp_path}",
        f"actor.path={model}",
        "actor.dtype=bfloat16",
        "rollout.dtype=bfloat16",
        "rollout.engine.kv_cache_gib=0.05",
        "rollout.verify.every_steps=1",
        "tracking.plot_every_steps=null",
        "gconfig.max_new_tokens=16",
        "threads=1",
    ]


def rows_of(summary):
    return [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.invariant
def test_gsm8k_trains_asynchronously_and_proves_its_deliveries(small, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train", "test"):
        (data / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in GSM8K))
    more = [f"train_dataset.path={data}", "async_training=true", "rollout.max_head_offpolicyness=2"]
    summary = train(load_config(TrainConfig, EXAMPLES / "gsm8k_grpo.yaml", [*small, *more, "total_train_steps=6"]))

    found = rows_of(summary)
    assert [row["step"] for row in found if "gap/verified" in row] == [1, 2, 3, 4, 5, 6]
    assert all(row["gap/numeric"] > 1e-4 for row in found)  # it was bfloat16
    assert all(row.get("gap/update_sigmas", 0) > -5 for row in found)


def test_the_main_job_runs_and_proves_its_deliveries(small):
    config = load_config(TrainConfig, EXAMPLES / "addition_grpo.yaml", [*small, "total_train_steps=4"])
    found = [row for row in rows_of(train(config)) if "gap/verified" in row]
    assert len(found) == 4 and all(row["gap/numeric"] > 1e-4 for row in found)


def test_in_float32_it_computes_as_a_float32_engine_with_rounded_weights(model):
    def engine(dtype):
        return SpreadEngine(TrainEngineConfig(path=str(model), dtype=dtype), total_steps=0, device="cpu")

    batch = pack([{"input_ids": torch.arange(5, 25), "loss_mask": torch.arange(20) > 3, "temperature": 0.7}])
    rounded, whole = engine("bfloat16"), engine("float32")
    whole.load_weights({name: tensor.bfloat16().float() for name, tensor in rounded.weights()}.items())
    before, exact = rounded.forward(batch).logprobs, whole.forward(batch).logprobs
    assert not torch.equal(before, exact)
    with rounded.in_float32() as can:
        assert can and torch.equal(rounded.forward(batch).logprobs, exact)
    assert torch.equal(rounded.forward(batch).logprobs, before)
    with whole.in_float32() as can:
        assert can and torch.equal(whole.forward(batch).logprobs, exact)


@pytest.fixture(params=[True, False], ids=["scored in float32", "scored in bfloat16"])
def world(request, model):
    world = World(model, dtype="bfloat16")
    if not request.param:  # ranks that share the weights cannot
        world.trainer.in_float32 = nullcontext
    world.exact = request.param
    yield world
    world.close()


def test_small_updates_that_arrive_are_never_called_missing(world):
    verifier = world.verifier()
    sigmas = []
    for _ in range(6):
        world.learn(step=2e-3)
        found = verifier.verify(pack(world.generate(tokens=48)), world.publisher.version.number)
        sigmas.append(found["gap/update_sigmas"])
        assert found["gap/numeric"] > 1e-3  # rounding hides the update from the size of the gap
    assert min(sigmas) > -3
    if world.exact:
        assert max(sigmas) > 5


def test_small_updates_that_never_arrive_end_the_run_within_the_tolerance_of_the_gap(world):
    schedule = Schedule(VerifyConfig(every_steps=20), eta=0)
    verifier = world.verifier(schedule=schedule)

    def a_step_whose_update_never_arrived():
        rows = world.generate(tokens=96)
        world.learn(step=3e-4)
        number = world.publisher.version.number
        for lie in rows:  # made by the version before
            lie["versions"] = torch.where(lie["versions"] >= 0, number, -1)
        return verifier.verify(pack(rows), number)

    def until_it_is_noticed():
        for _ in range(12):
            found = a_step_whose_update_never_arrived()
            assert found["gap/numeric"] < verifier.tolerance and found["gap/update_sigmas"] < 2

    with pytest.raises(DeliveryDisproved, match="of the last update before their version is missing"):
        until_it_is_noticed()
    assert schedule.suspicious


@pytest.mark.slow
@pytest.mark.invariant
def test_of_20000_runs_with_an_update_that_rounding_hides_none_is_suspected(model):
    """Resamples the sequences of real verifications; which score is called the older one is drawn, so nothing arrived."""
    world = World(model, dtype="bfloat16")
    world.trainer.in_float32 = nullcontext  # as on ranks that share the weights: the scores are noisy, too
    sequences = []
    for _ in range(4):
        world.learn(step=2e-5)  # changes the rounding of a few weights
        verified = world.verifier().score(pack(world.generate(tokens=96)), world.publisher.version.number)
        numbers = sequence_index(verified.batch)
        for number in range(len(verified.batch["cu_seqlens"]) - 1):
            mine = verified.known & (numbers == number)
            sequences.append((verified.batch["rollout_logprobs"][mine], verified.compared[mine], verified.older[mine]))
    world.close()
    assert all(float((scored - older).abs().mean()) > 1e-3 for _, scored, older in sequences)
    generator = torch.Generator().manual_seed(0)

    def sigmas():
        rollout, scored, older, number = [], [], [], []
        swaps = torch.rand(8, generator=generator) < 0.5
        for place, index in enumerate(torch.randint(len(sequences), (8,), generator=generator).tolist()):
            said, *pair = sequences[index]
            rollout.append(said)
            scored.append(pair[int(swaps[place])])
            older.append(pair[1 - int(swaps[place])])
            number.append(torch.full((len(said),), place))
        return Evidence.of(torch.cat(rollout), torch.cat(scored), torch.cat(older), torch.cat(number)).sigmas

    drawn = torch.tensor([sigmas() for _ in range(20_000)])
    assert 0.7 < float(drawn.std()) < 1.3  # a standard error is what it says
    assert int((drawn <= -SIGMAS).sum()) <= 2  # one in 10,000; a run ends after two in a row


@pytest.mark.parametrize(("spread", "tokens"), [(1.5, 32), (2.5, 256)])
def test_tokens_of_very_different_size_and_noise_are_not_taken_for_certain(spread, tokens):
    """Delivered updates whose steps, and the noise of the engine with them, are spread over orders of magnitude."""
    generator = torch.Generator().manual_seed(0)

    def sigmas():
        size = torch.exp(spread * torch.randn(tokens, generator=generator, dtype=torch.float64))
        noise, step = (size * torch.randn(tokens, generator=generator, dtype=torch.float64) for _ in range(2))
        return Evidence(20 * noise, step, torch.arange(tokens) % 8).sigmas

    drawn = torch.tensor([sigmas() for _ in range(2000)])
    assert int((drawn <= -SIGMAS).sum()) <= 6  # the run ends after two in a row: less than one in 100,000


def test_one_token_is_no_evidence():
    step = torch.zeros(16, dtype=torch.float64)
    step[3] = 1.0
    assert Evidence(step.clone(), step, torch.arange(16) // 2).sigmas == 0.0
