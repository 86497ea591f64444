"""vLLM and SGLang behind their stand-ins: they give their memory back by their own routes, and new weights wake them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.api.engines import InferencePart
from tandem.api.failures import ServerFailed
from tandem.api.requests import LLMRequest
from tandem.api.weights import WeightVersion
from tandem.config.devices import Seat
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.inference.build import ServerTerms, attached, build_fleet
from tandem.engines.inference.remote.foreign.server import StartTerms
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tandem.engines.train.engine import SpreadEngine
from tandem.flow.plan import plan_run
from tandem.flow.residency import Residency
from tandem.flow.sleep_plan import Part, PartCost, SleepPlan, StageNeeds, sleep_plan
from tandem.models.hardware import Hardware
from tandem.models.shape import read_shape
from tandem.tracking.statistics import PhaseTimer
from tandem.weights.cuda_ipc import BUCKET_BYTES, CudaIpcChannel, staged_bytes
from tests.engines_inference.remote.clients import KINDS, ask, attach, next_update, update_from_folder
from tests.fleet.fleets import RULES, Asking, patient, until
from tests.tiny import KINDS as MODELS
from tests.tiny import tiny_model_folder

BOTH: tuple[InferencePart, ...] = ("weights", "kv_cache")
ROUTES = {
    "vLLM": {
        "both": ["/sleep?level=2&mode=keep"],
        "kv_cache": ["/release_kv_cache_memory"],
        "wake weights": ["/wake_up?tags=weights"],
        "wake kv_cache": ["/wake_up?tags=kv_cache"],
    },
    "SGLang": {
        "both": ["/release_memory_occupation kv_cache weights"],
        "kv_cache": ["/release_memory_occupation kv_cache"],
        "wake weights": ["/resume_memory_occupation weights"],
        "wake kv_cache": ["/resume_memory_occupation kv_cache"],
    },
}


def sleeping(kind, folder, **options):
    """A stand-in that was started so that it can sleep."""
    server = kind[1](folder, **options)
    server.sleeps = True
    return server


def routes(kind, *names):
    return [path for name in names for path in ROUTES[kind[0].protocol.maker][name]]


def test_memory_is_given_back_by_the_servers_own_routes_and_new_weights_wake_it(kind, folder):
    with sleeping(kind, folder) as server:
        engine = attach(kind, server, folder)
        assert {"sleep_weights", "sleep_kv_cache"} <= engine.capabilities
        engine.sleep(BOTH)
        engine.sleep(BOTH)  # it sleeps already
        assert server.asleep == set(BOTH) and server.calls == routes(kind, "both")
        update = next_update(folder)
        engine.prepare_weights(update)
        engine.commit_weights(update.version)
        assert server.asleep == {"kv_cache"}, "the cache has no room before the trainer gives its own back"
        engine.wake(BOTH)
        assert not server.asleep and not server.paused
        assert server.calls == routes(kind, "both", "wake weights", "wake kv_cache")
        assert set(ask(engine).versions) == {1} and engine.statistics()["verified_tensors"] > 5
        engine.close()


def test_the_cache_sleeps_alone_and_then_the_weights_too(kind, folder):
    with sleeping(kind, folder) as server:
        engine = attach(kind, server, folder)
        engine.sleep(("kv_cache",))
        assert server.asleep == {"kv_cache"}
        engine.wake(("kv_cache",))
        assert set(ask(engine).versions) == {0}, "its weights are those that it had"
        engine.sleep(("kv_cache",))
        engine.sleep(("weights",))
        assert server.asleep == set(BOTH)
        engine.close()
    assert not server.asleep and not server.paused, "an attached server is left awake"


def test_a_cache_that_was_not_to_sleep_sleeps_and_wakes_with_the_weights(kind, folder):
    with sleeping(kind, folder) as server:
        engine = attach(kind, server, folder)
        for number, again in ((1, False), (2, True)):
            engine.sleep(("weights",))
            assert server.asleep == set(BOTH)
            if again:
                engine.sleep(("kv_cache",))
                engine.wake(("kv_cache",))
            update = next_update(folder, number, shift=float(number))
            engine.prepare_weights(update)
            engine.commit_weights(update.version)
            assert not server.asleep and not server.paused and set(ask(engine).versions) == {number}
        engine.close()


def test_a_server_with_requests_does_not_sleep(kind, folder):
    with sleeping(kind, folder, token_s=0.02) as server:
        engine = attach(kind, server, folder)
        engine.idle_patience_s = 0.05
        with Asking(engine, [LLMRequest((5, 6), GenerationConfig(max_new_tokens=40))]):
            until(lambda: server.running)
            with pytest.raises(RuntimeError, match="refused while 1 requests are under way"):
                engine.sleep(BOTH)
        assert not server.asleep
        engine.close()


@pytest.mark.parametrize("lacks", ["option", "route"])
def test_a_server_that_keeps_its_memory_is_refused_with_the_remedy(kind, folder, lacks):
    vllm = kind[0] is VllmServer
    server = kind[1](folder)
    server.sleeps = lacks == "route"
    server.spoils = {"/wake_up" if vllm else "/resume_memory_occupation"} if lacks == "route" else set()
    remedy = "--enable-sleep-mode" if vllm else "--enable-memory-saver"
    words = rf"(has no route /|was not started so that it can free its memory).*{remedy}.*memory_limit_gib"
    with server:
        engine = attach(kind, server, folder)
        assert not engine.capabilities & {"sleep_weights", "sleep_kv_cache"}
        with pytest.raises(ConfigError, match=words):
            engine.sleep(BOTH)
        assert not server.calls and set(ask(engine).versions) == {0}
        engine.close()
        rollout = RolloutConfig(backend=f"{kind[0].protocol.maker.lower()}:d1")
        terms = ServerTerms(
            rollout, rollout.engine, folder, torch.float32, "cpu", False, WeightVersion(0, run="r"), sleeps=True
        )
        with pytest.raises(ConfigError, match=words):
            attached(terms, kind[0].protocol.maker.lower(), server.url).make()


def test_a_server_that_fails_to_sleep_stays_paused(folder):
    with sleeping(KINDS["vllm"], folder) as server:
        engine = attach(KINDS["vllm"], server, folder)
        server.asleep = {"kv_cache"}  # somebody else put it to sleep
        with pytest.raises(ServerFailed):
            engine.sleep(("kv_cache",))
        with pytest.raises(ServerFailed, match="deliver weights again"):
            engine.resume()
        server.asleep = set()
        engine.close()


def test_the_command_of_a_server_that_must_sleep_says_so(kind):
    usual = StartTerms("python", Path("model"), "bfloat16", "cuda", EmbeddedEngineConfig(), (), Seat("s", (0,), 0.4))
    option = "--enable-sleep-mode" if kind[0] is VllmServer else "--enable-memory-saver"
    for terms in (usual, replace(usual, sleeps=True)):
        words, environment = kind[0].command(terms, 8000)
        assert (option in words) == terms.sleeps
        assert kind[0] is not VllmServer or environment["VLLM_SERVER_DEV_MODE"] == "1"


CPU, GPU = Hardware(kind="cpu", fast_bfloat16=False), Hardware(kind="gpu", memory_gib=0.01)


def planned(folder, *keys, where=GPU):
    usual = [f"actor.path={folder}", "train_dataset.path=addition", "rollout.fleet.memory_share=0.5"]
    config = load_config(TrainConfig, None, [*usual, *keys]).config
    return sleep_plan(config, plan_run(config), where)


def test_the_plan_counts_what_a_server_takes_of_the_device(kind, folder):
    backend = f"rollout.backend={kind[0].protocol.maker.lower()}:d1"
    plan = planned(folder, backend, "memory_limit_gib=0.0052", "algorithm=ppo")
    whole = sum(plan.parts[Part("engine", what)].num_bytes for what in BOTH)
    assert whole == pytest.approx(0.005 * 2**30, abs=1), "its share of the device"
    assert plan.beginning == {Part("engine", what) for what in BOTH}, "it took that when it started"
    update = next(done for done in plan.steady() if done.stage.name == "update")
    assert update.peak <= plan.limit and Part("engine", "kv_cache") not in update.awake
    with pytest.raises(ConfigError, match=r"cannot hold the stage 'generate'.*engine kv_cache"):
        planned(folder, backend, "memory_limit_gib=0.0049")
    with pytest.raises(ConfigError, match="is for placement=colocate"):
        planned(folder, backend, "memory_limit_gib=1", "rollout.fleet.servers=[vllm=http://127.0.0.1:1]")
    with pytest.raises(ConfigError, match="needs GPUs: on a CPU neither"):
        planned(folder, backend, "memory_limit_gib=1", where=CPU)


@pytest.mark.parametrize("model", MODELS)
def test_weights_that_a_server_opens_on_the_trainers_gpu_count_to_the_byte(model, tmp_path):
    folder = tiny_model_folder(tmp_path, model)
    engine = SpreadEngine(TrainEngineConfig(path=str(folder), dtype="float32"), total_steps=1)
    for dtype, size in ((torch.bfloat16, 4096), (torch.float32, 4096), (torch.bfloat16, BUCKET_BYTES)):
        channel = CudaIpcChannel("cpu", size)
        place = channel.put(engine.weights(dtype), dtype).source.place()
        allocated = sum(num_bytes for _, _, num_bytes in place["handles"])
        assert staged_bytes(read_shape(str(folder)).tensors(), dtype, size) == allocated
        channel.close()

    keys = ("rollout.backend=vllm:d1", "rollout.weights.channel=ipc")
    plan = planned(folder, *keys, "memory_limit_gib=1")
    delivered = Part("engine", "delivered weights"), allocated
    assert all(delivered in stage.passing for stage in plan.stages), "a server that is started again reads them too"
    publish = plan.stage("publish")
    others = sum(plan.parts[part].num_bytes for part in publish.awake | publish.gives)
    assert plan.least(publish) == others + allocated
    with pytest.raises(ConfigError, match=r"engine delivered weights 0\.0625.*or leave rollout\.weights\.channel=ipc out"):
        planned(folder, *keys, "memory_limit_gib=0.06")


def test_a_fleet_sleeps_while_others_work_and_generates_with_what_was_published(kind, folder, tmp_path):
    weights, cache, model = Part("engine", "weights"), Part("engine", "kv_cache"), Part("actor", "parameters")
    parts = {weights: PartCost(20, 0, 20), cache: PartCost(20, 0, 0, standing=True), model: PartCost(24, 24, 24)}
    stages = (
        StageNeeds("generate", frozenset({weights, cache})),
        StageNeeds("update", frozenset({model}), frozenset({model}), passing=((Part("actor", "gradients"), 10),)),
        StageNeeds("publish", frozenset({model}), gives=frozenset({weights})),
    )
    maker = kind[0].protocol.maker.lower()
    with sleeping(kind, folder) as server:
        rollout = RolloutConfig(backend="attached", fleet=patient(servers=(f"{maker}={server.url}",)))
        version = WeightVersion(0, run="r")
        terms = ServerTerms(rollout, rollout.engine, folder, torch.float32, "cpu", False, version, sleeps=True)
        fleet = build_fleet(terms, (), RULES)
        until(lambda: fleet.statistics()["fleet/healthy"] == 1)
        residency = Residency(SleepPlan(parts, stages, 44), tmp_path, PhaseTimer(), lambda *_: None)
        residency.add_engine(fleet)
        for number in (1, 2):
            residency.enter("generate")
            assert not server.asleep and set(ask(fleet).versions) == {number - 1}
            server.calls.clear()
            residency.enter("update")
            assert server.asleep == set(BOTH)
            residency.enter("publish")
            update = update_from_folder(folder, tmp_path / f"v{number}", number, shift=float(number))
            fleet.prepare_weights(update)
            fleet.commit_weights(update.version)
            assert server.asleep == {"kv_cache"}
        residency.enter("generate")
        assert server.calls == routes(kind, "both", "wake weights", "wake kv_cache")
        assert set(ask(fleet).versions) == {2} and fleet.statistics()["fleet/fenced"] == 0
        fleet.close()


def test_without_a_limit_only_a_servers_cache_sleeps_while_models_train(kind, folder, tmp_path):
    backend = f"rollout.backend={kind[0].protocol.maker.lower()}:d1"
    plan = planned(folder, backend, "algorithm=ppo")
    awake = [done.stage.name for done in plan.steady() if Part("engine", "kv_cache") in done.awake]
    assert awake == ["generate"] and {part.resident for part in plan.parts} == {"engine"} and plan.limit is None
    assert planned(folder, backend, "rollout.fleet.sleep=false") is None
    assert planned(folder, backend, where=CPU) is None, "a CPU's server cannot"
    with sleeping(kind, folder) as server:
        engine = attach(kind, server, folder)
        residency = Residency(plan, tmp_path, PhaseTimer(), lambda *_: None)
        residency.add_engine(engine)
        for number in (1, 2):
            residency.enter("generate")
            assert not server.asleep and set(ask(engine).versions) == {number - 1}
            server.calls.clear()
            for stage in ("values", "update", "publish"):
                residency.enter(stage)
                assert server.asleep == {"kv_cache"}
            update = update_from_folder(folder, tmp_path / f"v{number}", number, shift=float(number))
            engine.prepare_weights(update)
            engine.commit_weights(update.version)
        residency.enter("generate")
        assert server.calls == routes(kind, "kv_cache", "wake kv_cache")
        assert set(ask(engine).versions) == {2}
        engine.close()


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (
            ["rollout.fleet.sleep=true", "rollout.backend=vllm:d1", "placement=decoupled"],
            "sleep=true is for vLLM and SGLang",
        ),
        (["rollout.fleet.sleep=false", "rollout.backend=tandem:d1"], "sleep=false is for vLLM and SGLang"),
        (["rollout.fleet.sleep=false", "rollout.backend=vllm:d1", "memory_limit_gib=1"], "sleep=false contradicts memory_"),
    ],
)
def test_a_wish_to_sleep_that_cannot_be_or_contradicts_a_limit_is_refused(folder, items, words):
    with pytest.raises(ConfigError, match=words):
        planned(folder, *items)
