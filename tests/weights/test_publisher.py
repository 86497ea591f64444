"""Publishing to real engines, in this process and in another, while requests run."""

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from tandem.api.failures import EngineDied, WeightUpdateFailed
from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import FolderSource, WeightUpdate, version_digest
from tandem.config.errors import ConfigError
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.weights.channel import LocalChannel, LocalSource
from tandem.weights.collective import CollectiveChannel
from tandem.weights.disk import DiskChannel
from tandem.weights.publisher import VersionArchive, WeightPublisher, channel_for
from tandem.weights.shared_memory import SharedMemoryChannel
from tests.rollout.clockwork import ClockworkEngine
from tests.tiny import tiny_model, tiny_model_folder

PLACEMENTS = ("colocate", "decoupled")
ROLLOUT = RolloutConfig(dtype="float32", engine=EmbeddedEngineConfig(max_running=8, kv_cache_gib=0.01, threads=1))


class Weights:
    """Stands where the trainer does: its weights are those of a tiny model with a seed, or spoiled ones."""

    adapter = None

    def __init__(self, seed=0):
        self.become(seed)

    def become(self, seed):
        self.model, self.spoil = tiny_model(seed=seed), lambda named: named

    def weights(self, dtype=None):
        yield from self.spoil(
            (name, tensor if dtype is None else tensor.to(dtype)) for name, tensor in self.model.state_dict().items()
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


def build(folder, placement):
    return build_inference_engine(ROLLOUT, folder=folder, placement=placement, threads=1, device="cpu", deterministic=False)


@pytest.fixture(scope="module", params=PLACEMENTS)
def engine(request, folder):
    engine = build(folder, request.param)
    yield engine
    engine.close()


@pytest.fixture
def trainer():
    return Weights()


@pytest.fixture
def publisher(trainer, engine):
    publisher = WeightPublisher(trainer, engine, run="test", dtype=torch.float32)
    yield publisher
    publisher.close()


def ask(sample=0, tokens=8):
    gconfig = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens)
    return LLMRequest((5, 9, 44, 7), gconfig, noise_key=NoiseKey(seed=1, sample=sample))


def generate(engine, requests):
    async def all_of_them():
        return await asyncio.gather(*(engine.agenerate(request) for request in requests))

    return asyncio.run(asyncio.wait_for(all_of_them(), 60))


@torch.no_grad()
def score(model, response):
    """Log-probabilities of the response's tokens under a Hugging Face model, ``[T]``."""
    ids = torch.tensor([response.input_ids + response.output_ids])
    logprobs = model(ids).logits[0].log_softmax(-1)
    made = torch.arange(len(response.input_ids) - 1, ids.shape[1] - 1)
    return logprobs[made, ids[0, made + 1]]


def test_after_publishing_the_engine_generates_with_the_new_weights_and_says_so(engine, trainer, publisher):
    number = engine.version.number
    for seed in (1, 2):
        trainer.become(seed)
        metrics = publisher.publish()
        response = generate(engine, [ask()])[0]

        assert engine.version == publisher.version == publisher.history[number + seed]
        assert set(response.versions) == {engine.version.number} == {number + seed}
        torch.testing.assert_close(torch.tensor(response.logprobs), score(trainer.model, response), atol=1e-4, rtol=0)
        assert metrics["weights/delivered_mib"] * 2**20 == sum(t.nbytes for t in trainer.model.state_dict().values())
        assert (
            metrics["time/update_weights_s"]
            >= sum(metrics[f"time/{part}_s"] for part in ("prepare", "pause", "recompute"))
            > 0
        )
    assert publisher.history[number + 1].digest != publisher.history[number + 2].digest
    assert engine.version.run == "test"


def test_tokens_made_during_updates_have_log_probabilities_of_their_stamped_version(engine, trainer, publisher):
    trainer.become(0)
    publisher.publish()
    models = {publisher.version.number: trainer.model}

    async def updates_under_way():
        tasks = [asyncio.ensure_future(engine.agenerate(ask(i, tokens=400))) for i in range(8)]
        made = engine.statistics()["generated_tokens"]
        for seed in range(1, 6):
            while engine.statistics()["generated_tokens"] < made + 200 * seed:
                await asyncio.sleep(0.01)
            trainer.become(seed)
            models[publisher.version.number + 1] = trainer.model
            await asyncio.to_thread(publisher.publish)
        return await asyncio.gather(*tasks)

    responses = asyncio.run(asyncio.wait_for(updates_under_way(), 100))
    assert max(len(set(response.versions)) for response in responses) >= 3
    for response in responses:
        assert list(response.versions) == sorted(response.versions)
        stamped = torch.tensor(response.versions)
        recorded = torch.tensor(response.logprobs)
        for number in set(response.versions):
            mine = stamped == number
            torch.testing.assert_close(recorded[mine], score(models[number], response)[mine], atol=1e-3, rtol=0)
            wrong = (
                recorded[mine] - score(models[number - 1 if number - 1 in models else number + 1], response)[mine]
            ).abs()
            assert wrong.mean() > 0.01  # ten times the tolerance: a wrong stamp would show


def flip_a_bit(update):
    named = [(name, tensor.clone()) for name, tensor in update.source.tensors()]
    named[3][1].view(-1).view(torch.int32)[0] ^= 1
    return replace(update, source=LocalSource(tuple(named)))


def lose_a_tensor(update):
    return replace(update, source=LocalSource(tuple(update.source.tensors())[1:]))


def mix_digests_up(update):
    names = list(update.digests)
    swapped = {**update.digests, names[0]: update.digests[names[1]], names[1]: update.digests[names[0]]}
    return replace(update, digests=swapped)


@pytest.mark.parametrize(
    ("damage", "message"),
    [(flip_a_bit, "bytes changed"), (lose_a_tensor, "did not arrive|lacks|missing"), (mix_digests_up, "mixed up")],
)
def test_a_damaged_update_is_refused_and_the_old_version_stays(engine, trainer, publisher, damage, message):
    before = (engine.version, generate(engine, [ask()]))
    trainer.become(50)
    delivery = publisher.channel.put(trainer.weights(torch.float32), torch.float32)
    version = replace(engine.version, number=engine.version.number + 1, digest=version_digest(delivery.digests))

    with pytest.raises(WeightUpdateFailed, match=message):
        engine.prepare_weights(damage(WeightUpdate(version, delivery.source, delivery.digests, key=delivery.key)))
    with pytest.raises(WeightUpdateFailed, match="nothing is prepared"):
        engine.commit_weights(version)
    assert (engine.version, generate(engine, [ask()])) == before


def without_the_last(named):
    return list(named)[:-1]


def with_another_shape(named):
    return [(name, tensor[:-1] if tensor.dim() == 2 else tensor) for name, tensor in named]


def with_a_stranger(named):
    return [*named, ("model.surprise.weight", torch.zeros(3))]


def that_breaks_off(named):
    yield from list(named)[:2]
    raise RuntimeError("the trainer ran out of memory")


@pytest.mark.parametrize("spoil", [without_the_last, with_another_shape, with_a_stranger, that_breaks_off])
def test_weights_that_do_not_fit_are_published_nowhere_and_the_next_ones_are(engine, trainer, publisher, spoil):
    before = (engine.version, generate(engine, [ask()]))
    trainer.become(60)
    trainer.spoil = spoil
    with pytest.raises(WeightUpdateFailed, match=f"{before[0].number} stays"):
        publisher.publish()
    assert (engine.version, generate(engine, [ask()])) == before
    assert publisher.version == before[0]

    fresh = WeightPublisher(Weights(61), engine, run="test", dtype=torch.float32)
    fresh.publish()
    assert engine.version.number == before[0].number + 1
    assert generate(engine, [ask()]) != before[1]


def test_a_commit_returns_only_once_the_engine_has_its_own_copy(engine, trainer, publisher):
    trainer.become(70)
    publisher.publish()
    before = generate(engine, [ask()])
    with torch.no_grad():
        for parameter in trainer.model.parameters():  # what training does next
            parameter.zero_()
    publisher.channel.put(trainer.weights(torch.float32), torch.float32)
    assert generate(engine, [ask()]) == before


def test_publishing_works_while_the_engine_is_paused(engine, trainer, publisher):
    async def paused_update():
        task = asyncio.ensure_future(engine.agenerate(ask(tokens=200)))
        await asyncio.sleep(0.03)
        engine.pause()
        trainer.become(80)
        await asyncio.to_thread(publisher.publish)
        engine.resume()
        return await task

    response = asyncio.run(asyncio.wait_for(paused_update(), 60))
    assert response.versions[-1] == engine.version.number
    assert score(trainer.model, response)[-1].item() == pytest.approx(response.logprobs[-1], abs=1e-3)


def test_sleeping_weights_come_back_with_the_next_version(engine, trainer, publisher):
    trainer.become(90)
    engine.sleep(("weights", "kv_cache"))
    engine.wake(("weights", "kv_cache"))
    publisher.publish()
    response = generate(engine, [ask()])[0]
    torch.testing.assert_close(torch.tensor(response.logprobs), score(trainer.model, response), atol=1e-4, rtol=0)


@pytest.mark.parametrize("second", ["colocate", pytest.param("decoupled", marks=pytest.mark.slow)])
def test_two_engines_change_together_or_not_at_all(folder, second):
    trainer, engines = Weights(), [build(folder, placement) for placement in ("colocate", second)]
    publisher = WeightPublisher(trainer, engines, run="test", dtype=torch.float32)
    assert isinstance(channel_for(engines), SharedMemoryChannel if second == "decoupled" else LocalChannel)

    trainer.become(1)
    publisher.publish()
    assert {engine.version for engine in engines} == {publisher.version}
    assert generate(engines[0], [ask()])[0].output_ids == generate(engines[1], [ask()])[0].output_ids

    engines[1].close()
    trainer.become(2)
    with pytest.raises(WeightUpdateFailed, match="1 stays"):
        publisher.publish()
    assert engines[0].version.number == 1
    with pytest.raises(WeightUpdateFailed, match="nothing is prepared"):
        engines[0].commit_weights(publisher.version)
    engines[0].close()
    publisher.close()


class Staged(ClockworkEngine):
    """Takes every update, unless it has a fault: in ``prepare`` or in ``commit``."""

    def __init__(self, pause_s=0.0, **faults):
        super().__init__()
        self.pause_s, self.faults = pause_s, faults

    def prepare_weights(self, update):
        if "prepare" in self.faults:
            raise self.faults["prepare"]

    def commit_weights(self, version):
        if "commit" in self.faults:
            raise self.faults["commit"]
        super().commit_weights(version)
        return {"pause_s": self.pause_s, "recompute_s": 2 * self.pause_s}


def publisher_of(*engines, trainer=None, **options):
    return WeightPublisher(trainer or Weights(), engines, run="test", dtype=torch.float32, **options)


def test_the_slowest_engine_counts_and_one_that_stays_behind_is_closed():
    engines = Staged(0.25), Staged(0.5), Staged(0.0, commit=WeightUpdateFailed("no memory"))
    publisher = publisher_of(*engines)
    metrics = publisher.publish()
    assert (metrics["time/pause_s"], metrics["time/recompute_s"]) == (0.5, 1.0)
    assert [engine.dead for engine in engines] == [False, False, True]
    del engines[2].faults["commit"]
    publisher.publish()
    assert [engine.number for engine in engines] == [2, 2, 0]


def test_where_no_engine_switches_the_version_before_stays_and_no_other_lies_ready(tmp_path):
    engine, trainer, channel = Staged(), Weights(), DiskChannel(tmp_path)
    publisher = publisher_of(engine, trainer=trainer, channel=channel)
    publisher.publish()
    engine.faults["commit"] = WeightUpdateFailed("no memory")
    with pytest.raises(WeightUpdateFailed, match="version 2 was not published, 1 stays: no memory"):
        publisher.publish()
    assert [path.name for path in channel.folder.iterdir() if path.name != ".lock"] == ["update_1"] and not engine.dead
    del engine.faults["commit"]
    publisher.publish()
    assert engine.number == publisher.version.number == 2
    publisher.close()


def test_the_death_of_the_only_engine_is_told_and_of_one_of_several_a_failed_update():
    dying = Staged(prepare=EngineDied("it was killed"))
    with pytest.raises(EngineDied):
        publisher_of(dying).publish()
    with pytest.raises(WeightUpdateFailed, match=r"0 stays: .*it was killed"):
        publisher_of(Staged(), dying).publish()


def test_only_the_version_that_is_served_is_delivered_again():
    engine, trainer = Staged(), Weights()
    publisher = publisher_of(engine, trainer=trainer)
    publisher.publish()
    engine.number = 0  # as if its weights had slept
    publisher.deliver_again()
    assert engine.number == publisher.version.number == 1
    trainer.become(1)
    with pytest.raises(WeightUpdateFailed, match="version 1 cannot be delivered again: the trainer's weights have changed"):
        publisher.deliver_again()


def test_a_kept_version_stays_as_it_was_and_without_its_folder_it_is_none(tmp_path):
    archive, weights = VersionArchive(lambda number: True, most=1), torch.ones(3)
    archive.keep(1, LocalSource((("w", weights),)))
    archive.keep(2, FolderSource(tmp_path / "gone"))
    weights.zero_()  # what training does next
    assert dict(archive.get(1).tensors())["w"].tolist() == [1, 1, 1]
    assert archive.get(2) is None and archive.versions == [1]


def test_no_thread_is_left_after_publishing(engine, trainer, publisher):
    publisher.publish()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weight-")]


def test_a_rank_without_an_engine_takes_part_in_the_stream():
    trainer = Weights()
    publisher = WeightPublisher(trainer, (), run="test", dtype=torch.float32)
    publisher.publish()
    assert publisher.version.number == 1


def test_the_weights_that_training_begins_with_have_their_digest_too():
    trainer = Weights()
    publisher = WeightPublisher(trainer, (), run="test", dtype=torch.float32)
    publisher.publish()
    assert publisher.history[0].digest == publisher.history[1].digest != ""  # nothing was trained in between
    trainer.become(1)
    publisher.publish()
    assert publisher.history[2].digest != publisher.history[0].digest


def test_a_run_that_kept_other_digests_is_resumed_with_its_weights_and_no_others(tmp_path):
    trainer = Weights()
    folders = DiskChannel(tmp_path / "weights")  # which have SHA-256
    before = WeightPublisher(trainer, (), run="test", dtype=torch.float32, channel=folders)
    before.publish()
    after = WeightPublisher(trainer, (), run="another", dtype=torch.float32)
    after.load_state_dict(before.state_dict())
    assert after.version.number == 1 and after.version.digest != before.version.digest
    before.close()
    trainer.become(1)
    with pytest.raises(ConfigError, match="are not version 1 as it was delivered"):
        WeightPublisher(trainer, (), run="test", dtype=torch.float32).load_state_dict(after.state_dict())


def by_disk(tmp_path, folder):
    return DiskChannel(tmp_path / "weights", folder, shard_bytes=8192)


def by_process_group(tmp_path, folder):
    return CollectiveChannel(1, timeout_s=30)


@pytest.fixture(params=[by_disk, by_process_group])
def channel(request, tmp_path, folder):
    channel = request.param(tmp_path, folder)
    yield channel
    channel.close()
    assert not (tmp_path / "weights").exists()


@pytest.fixture
def other_publisher(trainer, engine, channel):
    return WeightPublisher(trainer, engine, run="test", dtype=torch.float32, channel=channel)


def test_a_folder_and_a_process_group_deliver_while_requests_run(engine, trainer, other_publisher):
    trainer.become(20)
    other_publisher.publish()
    models = {engine.version.number: trainer.model}

    async def asks_until(published, i):
        """Always has a request under way until the update is published, however long that takes."""
        responses = []
        while not published.is_set():
            responses.append(await engine.agenerate(ask(len(responses) * 4 + i, tokens=400)))
        return responses

    async def update_under_way():
        published = asyncio.Event()
        tasks = [asyncio.ensure_future(asks_until(published, i)) for i in range(4)]
        made = engine.statistics()["generated_tokens"]
        while engine.statistics()["generated_tokens"] < made + 20:
            await asyncio.sleep(0.005)
        trainer.become(21)
        models[engine.version.number + 1] = trainer.model
        await asyncio.to_thread(other_publisher.publish)
        published.set()
        return [response for responses in await asyncio.gather(*tasks) for response in responses]

    responses = asyncio.run(asyncio.wait_for(update_under_way(), 60))
    assert any(set(response.versions) == set(models) for response in responses)
    for response in responses:
        stamped, recorded = torch.tensor(response.versions), torch.tensor(response.logprobs)
        assert list(response.versions) == sorted(response.versions)
        assert set(response.versions) <= set(models)
        for number in set(response.versions):
            mine = stamped == number
            torch.testing.assert_close(recorded[mine], score(models[number], response)[mine], atol=1e-3, rtol=0)


@pytest.mark.parametrize("spoil", [without_the_last, with_another_shape, that_breaks_off])
def test_by_whatever_channel_a_failed_update_changes_nothing_and_the_next_one_works(engine, trainer, other_publisher, spoil):
    trainer.become(30)
    other_publisher.publish()
    before = (engine.version, generate(engine, [ask()]))
    trainer.become(31)
    trainer.spoil = spoil
    with pytest.raises(WeightUpdateFailed, match=f"{before[0].number} stays"):
        other_publisher.publish()
    assert (engine.version, generate(engine, [ask()])) == before

    trainer.become(32)
    other_publisher.publish()
    assert engine.version == other_publisher.version and engine.version.number == before[0].number + 1
    response = generate(engine, [ask()])[0]
    torch.testing.assert_close(torch.tensor(response.logprobs), score(trainer.model, response), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_an_engine_that_was_killed_ends_the_stream_at_once(folder):
    trainer, engine = Weights(), build(folder, "decoupled")
    channel = CollectiveChannel(1, timeout_s=60)
    publisher = WeightPublisher(trainer, engine, run="test", dtype=torch.float32, channel=channel)
    os.kill(engine.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDied):
        publisher.publish()
    assert time.monotonic() - began < 40
    publisher.close()
    engine.close()


class Reads(NamedTuple):
    """The facts that `channel_for` looks at."""

    capabilities: frozenset[str]


def test_a_folder_is_chosen_as_soon_as_one_engine_reads_from_a_disk(tmp_path):
    local, process, server = Reads(frozenset()), Reads(frozenset({"shared_memory"})), Reads(frozenset({"disk"}))
    disk = DiskChannel(tmp_path)
    for engines in ([server], [server, process], [local, server]):
        assert channel_for(engines, lambda: disk) is disk
    both = Reads(frozenset({"disk", "shared_memory", "in_place"}))
    for engines in ([local, process], [both], [both, process]):
        assert isinstance(channel_for(engines, lambda: disk), SharedMemoryChannel)
    assert isinstance(channel_for([local], lambda: disk), LocalChannel)
    with pytest.raises(ConfigError, match=r"reads weights from a folder.*DiskChannel\(folder"):
        channel_for([server])


def test_versions_that_will_be_asked_for_are_kept_as_delivered_and_then_let_go(engine, trainer, channel):
    archive = VersionArchive(lambda number: number % 2 == 0, most=1)
    publisher = WeightPublisher(trainer, engine, run="test", dtype=torch.float32, channel=channel, archive=archive)
    expected = {engine.version.number: trainer.model.state_dict()}
    for seed in range(40, 44):
        trainer.become(seed)
        publisher.publish()
        expected[engine.version.number] = trainer.model.state_dict()
        for number in archive.versions:
            assert all(torch.equal(t, expected[number][name]) for name, t in archive.get(number).tensors())
        newest = engine.version.number
        near = {number for number in archive.versions if newest - number <= 1}
        assert near == {number for number in (newest, newest - 1) if number % 2 == 0 and number in expected}
    in_memory = isinstance(channel, CollectiveChannel)
    assert (archive.num_bytes > 0) == in_memory
