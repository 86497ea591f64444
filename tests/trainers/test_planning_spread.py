"""Adapters, layouts, DeepSpeed, offloading: what the plan says they hold, by hand and against real engines."""

from importlib.util import find_spec

import pytest

from tandem.cli.main import main
from tandem.config.experiment import SFTConfig
from tandem.config.load import load_config
from tandem.engines.train.engine import SpreadEngine
from tandem.flow.planned_models import Resident
from tandem.models.shape import Shape, read_shape
from tandem.planning.fit import Plan
from tandem.planning.job import Lengths, Saves, checkpoint_of, job_of, saves_of
from tandem.planning.memory import HOST, gradients_between, instants, states
from tandem.planning.planned_model import planned_model
from tandem.trainers.lengths import known_lengths
from tests.ranks import on_two
from tests.tiny import tiny_model_folder
from tests.trainers.held_on_ranks import config_of, held_by, held_under
from tests.trainers.planning import HAND, adapters, generator, held, job, round_machine

P = HAND.parameters()
A = 2 * 2 * (2 * (10 + 8) + 2 * (10 + 4) + 3 * (10 + 30))
"""Adapters of rank 2 on the matrices of two layers: 736."""

EVEN = Shape("llama", layers=2, hidden=8, intermediate=12, heads=4, kv_heads=2, head_dim=2, vocab=10, context=64)
"""Two ranks can halve it. A layer: 8 · (2 · 8 + 2 · 4 + 3 · 12) = 480 and two norms of 8. Embedding and head: 80."""

GPU = round_machine(kind="gpu", count=4)


def of(found, phase, what, role="actor"):
    """The item of one role in a phase."""
    instant = next(instant for instant in found if instant.phase == phase)
    return next(item for item in instant.items if (item.role, item.what) == (role, what))


def kinds(model):
    """The bytes of a model that stay on one rank, by kind."""
    return states(model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"), "llama", num_key_value_heads=4)


def planned_of(config, head="lm"):
    """The model of a training engine's configuration, as the plan sees it."""
    resident = Resident("actor", config, head=head, trained=True)
    return planned_model(resident, round_machine(), read_shape(config.path))


def test_adapters_by_hand():
    model = held(adapters=adapters())

    assert model.masters == A == 736 and model.base == P
    assert kinds(model) == {"parameters": 4 * P + 4 * A, "optimizer": 8 * A}
    rounded = held(adapters=adapters(), dtype="bfloat16")
    assert kinds(rounded) == {"parameters": 2 * P + 4 * A, "parameters, rounded": 2 * A, "optimizer": 8 * A}
    critic = held(adapters=adapters(), head="scalar")
    assert critic.masters == A + 10 and critic.base == HAND.parameters("scalar") - 10


def test_beside_adapters_gradients_are_the_adapters_alone():
    found = instants(job(held(adapters=adapters(), max_tokens=12)), round_machine())

    assert of(found, "optimizer: actor", "gradients").num_bytes == 4 * A
    assert of(found, "optimizer: actor", "norm of the gradients").num_bytes == 12 * 2 * 30
    update = next(instant for instant in found if instant.phase == "update: actor")
    assert sum(item.num_bytes for item in update.items if item.what in ("gradient of the head", "gradients")) == 4 * A


def test_a_reference_beside_adapters_is_free():
    reference = held("reference", trained=False, own=False)

    assert kinds(reference) == {}


def test_an_adapter_is_published_alone_and_its_base_read_again():
    whole, alone = (job(held(), generator=generator(adapter=count, own_process=True)) for count in (0, A))
    machine = round_machine()

    assert of(instants(whole, machine), "publish", "shared weights", "engine").num_bytes == 4 * P
    found = instants(alone, machine)
    assert of(found, "publish", "shared weights", "engine").num_bytes == 4 * A
    assert of(found, "publish", "files of the base", "publish").num_bytes == 4 * P


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_those_of_the_real_engine(folder, dtype):
    config = config_of(folder, "fsdp:d1", rank=4, dtype=dtype)
    engine, said = SpreadEngine(config, total_steps=9), kinds(planned_of(config))
    real = held_by(engine)

    trained = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
    by_hand = 2 * 4 * (4 * (32 + 32) + 3 * (32 + 64))  # two layers, rank 4
    assert sum(parameter.numel() for parameter in trained) == by_hand == planned_of(config).masters
    assert real["optimizer"] == said["optimizer"] == 8 * by_hand
    assert real["weights"] == said["parameters"] + said.get("parameters, rounded", 0)


@pytest.mark.parametrize("head", ["scalar", "both"])
def test_new_heads_are_trained_beside_adapters(folder, head):
    config = config_of(folder, "fsdp:d1", rank=4)
    model = SpreadEngine(config, total_steps=9, head=head).model

    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == planned_of(config, head).masters
    assert sum(p.numel() for p in model.parameters()) - trained == planned_of(config, head).base


SPREAD = {
    "sharded": {"backend": "fsdp:d2"},
    "sharded, rounded": {"backend": "fsdp:d2", "dtype": "bfloat16"},
    "sharded, summed each": {"backend": "fsdp:d2", "gradient_sync": "micro_batch"},
    "cut": {"backend": "fsdp:d1t2"},
    "cut, rounded": {"backend": "fsdp:d1t2", "dtype": "bfloat16"},
    "tokens shared": {"backend": "fsdp:d1c2"},
    "copies": {"backend": "fsdp:d1r2"},
    "adapters, sharded": {"backend": "fsdp:d2", "rank": 4, "dtype": "bfloat16"},
}


@pytest.mark.slow
def test_what_two_ranks_hold_together_is_what_the_plan_says(folder, tmp_path):
    ranks = on_two(held_under, folder, SPREAD, out=tmp_path)

    for name, case in SPREAD.items():
        model = planned_of(config_of(folder, **case))
        said = {what: 2 * each for what, each in states(model).items()}
        real = {what: sum(rank[name][what] for rank in ranks) for what in ("weights", "optimizer")}
        assert real["weights"] == said["parameters"] + said.get("parameters, rounded", 0), name
        assert real["optimizer"] == said["optimizer"], name
        between = 2 * sum(gradients_between(model, cpu=True).values())
        assert sum(rank[name]["gradients"] for rank in ranks) == between, name


ZERO = {f"stage {stage}": {"backend": f"deepspeed:zero{stage}:d2"} for stage in (1, 2, 3)}
ZERO["stage 3, rounded"] = {"backend": "deepspeed:zero3:d2", "dtype": "bfloat16"}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed, an extra, is not installed")
def test_what_two_ranks_of_deepspeed_hold_together_is_what_the_plan_says(folder, tmp_path):
    ranks = on_two(held_under, folder, ZERO, out=tmp_path)

    for name, case in ZERO.items():
        model = planned_of(config_of(folder, **case))
        said = {what: 2 * each for what, each in states(model).items()}
        real = {
            what: sum(rank[name].get(what, 0) for rank in ranks) for what in ("weights", "masters", "optimizer", "buffer")
        }
        pairs = {"weights": "parameters", "masters": "masters", "optimizer": "optimizer", "buffer": "buffer of gradients"}
        for what, kind in pairs.items():
            assert real[what] == pytest.approx(said.get(kind, 0), rel=0.02), (name, what)  # its pieces are filled up


def test_shards_tensor_parallelism_context_and_copies_divide_what_they_should():
    backends = ("fsdp:d1", "fsdp:d2", "fsdp:d1t2", "fsdp:d2t2", "fsdp:d1c2", "fsdp:d2r2")
    plain, d2, t2, d2t2, c2, d2r2 = (held(shape=EVEN, backend=backend) for backend in backends)
    whole = 2 * (480 + 16) + 2 * 80 + 8
    cut = 2 * (240 + 16) + 2 * 40 + 8  # norms stay whole

    assert [kinds(model)["optimizer"] for model in (plain, d2, t2, d2t2, c2, d2r2)] == [
        8 * whole, 8 * whole / 2, 8 * cut, 8 * cut / 2, 8 * whole / 2, 8 * whole / 2,
    ]  # fmt: skip


def test_activations_are_divided_by_context_and_those_between_matrices_are_not_cut():
    def kept(backend, what="activations"):
        found = instants(job(held(shape=EVEN, backend=backend), groups=1), GPU)
        return of(found, "score: actor" if what == "logits" else "update: actor", what).num_bytes

    assert kept("fsdp:d1c2") < kept("fsdp:d1")
    assert kept("fsdp:d1") / 2 < kept("fsdp:d1t2") < kept("fsdp:d1")
    logits = {
        backend: of(instants(job(held(shape=EVEN, backend=backend), proximal=True), GPU), "score: actor", "logits").num_bytes
        for backend in ("fsdp:d1", "fsdp:d1t2")
    }
    assert logits["fsdp:d1t2"] == logits["fsdp:d1"] / 2 == 4 * 2 * 16 * 5


def test_gradients_are_whole_between_micro_batches_unless_each_is_summed():
    def between(**changes):
        found = instants(job(held(backend="fsdp:d4", max_tokens=12, **changes), groups=8), GPU)
        return of(found, "update: actor", "gradients").num_bytes

    assert between() == 4 * P and between(sync_each=True) == 4 * P / 4


def test_the_stages_of_deepspeed_divide_one_thing_more_each():
    """arXiv:1910.02054: moments and masters, gradients, parameters."""
    one, two, three = (kinds(held(backend=f"deepspeed:zero{stage}:d4", dtype="bfloat16")) for stage in (1, 2, 3))

    assert one == two == {"parameters": 2 * P, "masters": P, "optimizer": 2 * P}
    assert three == {"parameters": P / 2, "masters": P, "buffer of gradients": P, "optimizer": 2 * P}


def test_offloaded_models_are_in_host_memory_but_for_what_computes():
    found = instants(job(held(backend="fsdp:d2", offload=True, sync_each=True)), GPU)
    states_of = [of(found, "optimizer: actor", what) for what in ("parameters", "optimizer", "gradients")]

    assert [item.devices for item in states_of] == [HOST] * 3
    assert sum(item.num_bytes for item in states_of) == 16 * P  # of both ranks, which share the host
    assert of(found, "update: actor", "gathered parameters").devices == range(2)


def test_ranks_are_counted_together_on_a_cpu_and_apart_on_gpus():
    run = job(held(backend="fsdp:d2"), generator=generator())
    cpu, gpu = (Plan(run, machine) for machine in (round_machine(), GPU))

    assert gpu.peak_gib(1) < gpu.peak_gib() < cpu.peak_gib() < 2.5 * gpu.peak_gib()  # the engine is on the first alone


def test_each_rank_that_cuts_matrices_copies_its_part_for_a_save_beside_training():
    found = instants(job(held(shape=EVEN, backend="fsdp:d1t2"), saves=Saves(beside=True)), GPU)

    copied = of(found, "save", "copy that is saved")
    assert copied.num_bytes == (12 + 4) * 2 * (2 * (240 + 16) + 2 * 40 + 8) and copied.devices == HOST


def test_deepspeed_gathers_one_tensor_in_float32_where_a_rank_has_no_whole_one():
    def whole(backend, dtype):
        found = instants(job(held(backend=backend, dtype=dtype), generator=generator()), GPU)
        publish = next(instant for instant in found if instant.phase == "publish")
        return [item.num_bytes for item in publish.items if item.what == "one whole tensor"]

    assert whole("deepspeed:zero3:d2", "float32") == whole("deepspeed:zero2:d2", "bfloat16") == [4 * 1000]
    assert whole("deepspeed:zero1:d2", "float32") == whole("deepspeed:zero2:d2", "float32") == []


@pytest.mark.parametrize(
    ("keys", "rows", "most"),
    [
        (["every_steps=10"], 45, 3),
        (["every_steps=10", "at_end=false", "keep_last=null"], 45, 4),
        (["every_steps=10", "keep_every=50"], 100, 5),  # 50, and at the end 80, 90 and 100 beside it
        (["every_steps=10", "keep_best=loss"], 100, 4),
        (["every_steps=null"], 5, 1),
        (["every_steps=10", "at_end=false"], 5, 0),
        (["every_steps=null", "at_end=false"], None, 0),
        (["every_steps=10"], None, 3),
        (["every_steps=10", "keep_last=null"], None, None),
    ],
)
def test_checkpoints_that_there_are_at_a_time_are_counted(keys, rows, most):
    written = ["train_dataset.path=addition", "batch_size=1", *(f"checkpoint.{key}" for key in keys)]
    config = load_config(SFTConfig, None, written).config
    assert saves_of(config, rows).most == most


def test_a_checkpoint_by_hand():
    plain = checkpoint_of([held(dtype="bfloat16"), held("reference", trained=False)], Saves())
    assert plain == {"models": 2 * P, "adapters": 0, "state": 12 * P}
    thin = checkpoint_of([held(dtype="bfloat16", adapters=adapters())], Saves())
    assert thin == {"models": 2 * P, "adapters": 4 * A, "state": 12 * A}
    assert sum(checkpoint_of([held(backend="fsdp:d2")], Saves(resumable=False)).values()) == 4 * P


@pytest.mark.parametrize("more", [[], ["actor.lora.rank=8"]], ids=["all weights", "adapters"])
def test_a_saved_checkpoint_has_the_size_that_the_plan_says(tmp_path, more):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 8192}
    folder = tiny_model_folder(tmp_path, **sizes)
    keys = [f"actor.path={folder}", "train_dataset.path=addition", "batch_size=4", "max_length=96", "total_train_steps=1"]
    keys += [f"run.root={tmp_path / 'runs'}", "actor.dtype=float32", *more]
    config = load_config(SFTConfig, None, keys).config
    run = job_of(config, round_machine(), known_lengths(config).lengths, read_shape)
    said = sum(checkpoint_of(run.models, run.saves).values())

    assert main(["sft", *keys]) == 0
    saved = next((tmp_path / "runs").glob("*/*/checkpoints/step_1"))
    real = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())

    assert said == pytest.approx(real, rel=0.03)


def test_gloo_makes_a_copy_of_what_it_sums():
    def update(backend, machine, what):
        run = job(held(backend=backend), lengths=Lengths(2, 1), groups=2, trained=1)
        item = of(instants(run, machine), "update: actor", what)
        return item.num_bytes / (2 if machine is cpu else 1) / 4

    cpu, gpu = round_machine(), round_machine(kind="gpu", count=2)
    embedding = HAND.embedding
    summed = "gradient of the embedding"  # one of the head would be the second
    assert update("fsdp:d2", cpu, summed) - update("fsdp:d2", gpu, summed) == embedding
    assert update("deepspeed:zero3:d2", cpu, "buckets") - update("deepspeed:zero3:d2", gpu, "buckets") == P


@pytest.mark.parametrize("machine", [round_machine(), GPU])
def test_a_model_on_fewer_ranks_is_counted_on_these_alone(machine):
    def bytes_of(backend):
        planned = instants(job(held(backend="fsdp:d2"), held("reference", trained=False, backend=backend)), machine)
        item = of(planned, "save", "parameters", role="reference")
        return item.num_bytes * len(item.devices)

    assert bytes_of("fsdp:d1") == bytes_of("fsdp:d2") == 4 * P
    assert bytes_of("fsdp:d1r2") == 2 * 4 * P


def test_a_model_on_another_rank_is_counted_on_that_device():
    planned = instants(job(held(backend="fsdp:d2"), held("reference", trained=False, backend="fsdp:d1@1")), GPU)
    item = of(planned, "save", "parameters", role="reference")
    assert item.devices == range(1, 2)
