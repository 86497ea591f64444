"""The executor on the real engine, with a tiny model."""

import contextlib
import itertools

import pytest
import torch

from tandem.api.failures import WrongWorkflow
from tandem.api.requests import LLMRequest, StopReason
from tandem.api.workflow import RolloutWorkflow
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.models.tokenizer import load_tokenizer
from tandem.rollout.executor import Rollout
from tandem.rollout.multi_turn import MultiTurnWorkflow
from tandem.rollout.workflows import Repeated, RLVRWorkflow
from tests.rollout.clockwork import Constant
from tests.tiny import tiny_model_folder

CONFIG = RolloutConfig(
    batch_size=3,
    dtype="float32",
    engine=EmbeddedEngineConfig(max_running=16, kv_cache_gib=0.02, max_model_len=128, threads=1),
)
SAMPLING = GenerationConfig(max_new_tokens=6, temperature=0.9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_engine(folder):
    engines = []

    def make():
        engines.append(
            build_inference_engine(CONFIG, folder=folder, placement="colocate", threads=1, device="cpu", deterministic=True)
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def questions():
    for index in itertools.count():
        content = f"{index} + 1 =" if index != 1 else "long " * 200
        yield {
            "messages": [{"role": "user", "content": content}],
            "answer": "1",
            "tandem.epoch": 0,
            "tandem.index": index,
            "tandem.source": "sums",
        }


def two_batches(engine, folder, deterministic):
    workflow = Repeated(RLVRWorkflow(Constant(), SAMPLING, load_tokenizer(folder)), 2)
    with Rollout(engine, CONFIG, seed=3, deterministic=deterministic) as rollout:
        batches, rows = [], questions()
        for _ in range(2):
            batches.append(rollout.prepare_batch(rows, workflow))
            rollout.end_step()
        return batches, rollout.metrics(), rollout.last_groups


class Shows(RolloutWorkflow):
    """Sends a picture to an engine that takes none."""

    async def arun_episode(self, engine, data):
        return await engine.agenerate(LLMRequest((1, 2), SAMPLING, media=(-7, 0)))


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("placement", ["colocate", "decoupled"])
def test_a_picture_that_no_engine_takes_ends_the_run_with_the_remedy(folder, placement):
    engine = build_inference_engine(CONFIG, folder=folder, placement=placement, threads=1, device="cpu", deterministic=False)
    with contextlib.closing(engine), Rollout(engine, CONFIG) as rollout:
        with pytest.raises(WrongWorkflow, match=r"LLMRequest.media is set.* send tokens alone"):
            rollout.rollout_batch([next(questions())], Repeated(Shows(), 2))
        assert engine.statistics()["generated_tokens"] == 0


def test_two_deterministic_runs_are_equal_to_the_bit(make_engine, folder):
    (one, metrics, groups), (two, _, _) = (two_batches(make_engine(), folder, True) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert sorted(a.keys()) == sorted(b.keys())
        assert all(torch.equal(a[name].nan_to_num(), b[name].nan_to_num()) for name in a.keys())
    assert metrics["episodes/trained"] == 6
    assert metrics["episodes/dropped/prompt_too_long"] == 1  # counted, and another took its place
    assert [group.data["tandem.index"] for group in groups] == [4, 5, 6]
    assert {group.source for group in groups} == {"sums"}


def test_noise_does_not_depend_on_the_mode(make_engine, folder):
    (one, _, _), (two, _, _) = (two_batches(make_engine(), folder, deterministic) for deterministic in (True, False))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, two, strict=True))


def test_several_turns_are_one_trajectory_of_what_the_engine_made(make_engine, folder):
    tokenizer = load_tokenizer(folder)
    workflow = MultiTurnWorkflow(Constant(), SAMPLING, tokenizer, max_turns=2)
    engine = make_engine()
    with Rollout(engine, CONFIG) as rollout:
        batch = rollout.prepare_batch((row for row in questions() if row["tandem.index"] != 1), workflow)
        assert len(batch["reward"]) == 3
        assert set(batch["stop_reason"].tolist()) <= {StopReason.STOP, StopReason.LENGTH}
        assert int(batch["loss_mask"].sum()) == engine.statistics()["generated_tokens"]
