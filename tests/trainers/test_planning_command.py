"""`tandem plan`: what it prints, and what it proposes where a run does not fit."""

import json
import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tandem.cli.main import main
from tandem.config.devices import devices_of
from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig
from tandem.engines.inference.build import engine_settings
from tandem.models.shape import engine_bytes, read_shape
from tandem.planning.fit import PROMPT_TOKENS, Plan, drawing, uses
from tandem.planning.job import Lengths, job_of
from tandem.planning.machine import DEVICES, device, this_machine
from tandem.trainers.lengths import known_lengths
from tests.tiny import tiny_config, tiny_model_folder, tiny_tokenizer
from tests.trainers.planning import LLAMA_8B, SMOLLM2, round_machine

LENGTHS = Lengths(100, 200)
UNITS = r"GiB|s|ms|min|%|(completion )?tokens?(/s)?|GB/s|M parameters|layers|ranks?|threads?|steps?|rows?|checkpoints?"


@pytest.fixture
def model(tmp_path):
    """A folder with a configuration and a tokenizer, and no weights."""
    folder = tmp_path / "model"
    tiny_config("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def here(monkeypatch):
    """A machine that need not be measured."""
    machine = round_machine(process_gib=0.5, worker_gib=0.03)
    monkeypatch.setattr("tandem.cli.planning.this_machine", lambda **_: machine)
    return machine


def planned(kind, keys, machine, shape=LLAMA_8B):
    """The plan of a configuration."""
    return Plan(job_of(load_config(kind, None, keys).config, machine, LENGTHS, lambda _: shape), machine)


RL = ["train_dataset.path=addition", "gconfig.max_new_tokens=200"]


def test_the_command_says_memory_time_disk_and_arithmetic(model, here, capsys):
    code = main(["plan", f"actor.path={model}", "train_dataset.path=addition"])

    said = capsys.readouterr().out
    assert code == 0
    for words in ("Memory in GiB", "It fits", "Time of a step: --measure", "Disk", "Micro-batches", "Assumed"):
        assert words in said
    assert "mean of the first 64 rows" in said and "update: actor" in said and "publish" in said


def test_every_figure_of_the_text_has_a_unit(model, here, capsys):
    main(["plan", f"actor.path={model}", "train_dataset.path=addition", "algorithm=ppo", "algorithm.kl.coefficient=0.1"])

    text = capsys.readouterr().out
    memory, _, rest = text.partition("It fits")
    table = [line for line in memory.splitlines() if line.startswith("  ")]
    assert "Memory in GiB" in memory and len(table) > 8  # the unit of every cell is in the heading
    assert all(line.endswith(" GiB") for line in table if ": " in line and line[2:].split(":")[0] in ("actor", "critic"))
    for line in rest.partition("Step:")[0].splitlines():  # behind it the arithmetic, which counts things and names them
        for figure in re.finditer(r"(?<![\w.])\d[\d.,e+-]*", line):
            assert re.match(rf" ?({UNITS})|[^ ]*%| are kept", line[figure.end() :]), (line, figure.group())


def test_every_figure_of_the_data_has_a_unit_in_its_key(model, here, capsys):
    assert main(["plan", f"actor.path={model}", "train_dataset.path=addition", "--json"]) == 0

    data = json.loads(capsys.readouterr().out)

    def figures(value, key=""):
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from figures(inner, key if key.endswith("spent_s") else name)
        elif isinstance(value, float):
            yield key

    assert {key for key in figures(data) if not key.endswith(("_gib", "_s", "_per_s"))} == set()
    assert data["fits"] is True and data["memory"]["peak_gib"] > 0


def test_a_folder_without_weights_is_enough_and_nothing_is_written(model, here, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))

    main(["plan", f"actor.path={model}", "train_dataset.path=addition"])

    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_another_device_is_planned_for_by_name(model, capsys):
    assert main(["plan", f"actor.path={model}", "train_dataset.path=addition", "--device", "h200", "--count", "8"]) == 0

    said = capsys.readouterr().out
    assert "h200 × 8" in said and "https://github.com/stas00/ml-engineering" in said


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--device", "h300"], "did you mean 'h200'"), (["--count", "2"], "--count goes with --device")],
)
def test_wrong_arguments_are_said(model, more, message, capsys):
    assert main(["plan", f"actor.path={model}", "train_dataset.path=addition", *more]) == 2
    assert message in capsys.readouterr().err


def test_what_does_not_fit_ends_with_1_and_says_what_is_largest(model, here, monkeypatch, capsys):
    monkeypatch.setattr("tandem.cli.planning.this_machine", lambda **_: round_machine(memory_gib=0.05))
    keys = ["actor.max_tokens_per_micro_batch=65536", "gconfig.max_new_tokens=400", "gconfig.n_samples=64"]

    assert main(["plan", f"actor.path={model}", "train_dataset.path=addition", *keys]) == 1

    said = capsys.readouterr().out
    assert "It does not fit" in said
    assert re.search(r"Most of it is activations, [\d.]+ GiB; what helps: a smaller actor.max_tokens_per_micro_batch", said)


def test_more_ranks_than_devices_are_said():
    plan = planned(TrainConfig, [*RL, "actor.backend=fsdp:d8"], device("h200", 2), shape=SMOLLM2)

    assert plan.problems == ("it wants 8 ranks, and there are 2 devices",)


def test_a_cache_that_holds_no_sample_is_said():
    keys = [*RL, "rollout.engine.kv_cache_gib=0.005"]
    plan = planned(TrainConfig, keys, round_machine(memory_gib=64.0), shape=SMOLLM2)

    assert "KV cache" in plan.problems[0] and "rollout.engine.kv_cache_gib is 0.005 GiB" in plan.problems[0]


def test_the_plan_has_the_cache_and_the_chunk_that_the_engine_will_have(tmp_path):
    keys = ["rollout.dtype=bfloat16", "train_dataset.path=addition", "rollout.backend=embedded"]
    plan = planned(TrainConfig, keys, device("h100"), shape=SMOLLM2)
    engine, memory = plan.job.generator, plan.machine.memory_gib

    weights = engine_bytes(SMOLLM2, "bfloat16", cpu=False) / 2**30
    assert engine.kv_cache_gib == pytest.approx(0.4 * memory - 2 * weights)
    assert engine.prefill_chunk == 8192

    rollout, folder = load_config(TrainConfig, None, keys).config.rollout, tiny_model_folder(tmp_path)
    devices = devices_of(rollout, "colocate", ranks=1, devices=1)
    settings = engine_settings(rollout, folder, "cuda", devices, memory)
    tiny = planned(TrainConfig, keys, device("h100"), shape=read_shape(str(folder))).job.generator
    assert settings.kv_cache_gib == pytest.approx(tiny.kv_cache_gib, rel=1e-6)
    assert settings.prefill_chunk_tokens == tiny.prefill_chunk


@pytest.mark.parametrize(
    ("kind", "keys", "roles", "sequences"),
    [
        (SFTConfig, [], ["actor"], 1),
        (PreferenceConfig, [], ["actor", "reference"], 2),
        (PreferenceConfig, ["loss=simpo"], ["actor"], 2),
        (PreferenceConfig, ["loss=kto"], ["actor", "reference"], 1),
        (RewardModelConfig, [], ["actor"], 2),
        (RewardModelConfig, ["supervision=steps"], ["actor"], 1),
        (DistillConfig, ["teacher.path=t"], ["actor", "teacher"], 1),
        (TrainConfig, ["algorithm=ppo"], ["actor", "critic"], 8),
        (TrainConfig, ["algorithm=ppo", "critic.shared=true"], ["actor"], 8),
        (TrainConfig, ["algorithm.kl.coefficient=0.1"], ["actor", "reference"], 8),
    ],
)
def test_each_kind_of_run_holds_its_models(kind, keys, roles, sequences):
    config = load_config(kind, None, ["train_dataset.path=addition", *keys]).config
    job = job_of(config, round_machine(), Lengths(10, 20), lambda _: SMOLLM2)

    assert [model.role for model in job.models] == roles and job.trained == sequences
    assert (job.generator is None) == (kind in (SFTConfig, PreferenceConfig, RewardModelConfig))


def test_servers_of_another_make_have_their_share():
    keys = [*RL, "rollout.backend=vllm:d1", "rollout.fleet.vllm_python=python"]
    plan = planned(TrainConfig, keys, device("h200"), shape=SMOLLM2)

    (use,) = uses(plan)
    weights = 2 * SMOLLM2.parameters() / 2**30
    share = [0.4 * plan.machine.memory_gib if one.phase == "generate" else weights for one in plan.instants]
    assert use.residents["engine"] == pytest.approx(share), "it sleeps while the model trains"
    awake = planned(TrainConfig, [*keys, "rollout.fleet.sleep=false"], device("h200"), shape=SMOLLM2)
    assert uses(awake)[0].residents["engine"] == pytest.approx([max(share)] * len(plan.instants))
    opened = planned(TrainConfig, [*keys, "rollout.weights.channel=ipc"], device("h200"), shape=SMOLLM2)
    buckets = opened.job.generator.opened / 2**30
    assert weights < buckets < 1.3 * weights
    assert uses(opened)[0].residents["engine"] == pytest.approx([one + buckets for one in share])


def test_the_drawing_has_each_rank_and_server_on_its_device_without_sleeping_ones():
    keys = [*RL, "actor.backend=fsdp:d4", "rollout.backend=vllm:d2t2", "rollout.fleet.vllm_python=python"]
    apart = ["async_training=true", "rollout.max_head_offpolicyness=2"]
    even = replace(SMOLLM2, heads=8, kv_heads=4)  # heads that two GPUs can share
    plan = planned(TrainConfig, [*keys, *apart], device("h100", 8), shape=even)
    text = list(drawing(plan))
    assert "GPU 0 to 3, each: ranks 0 to 3" in text
    share = "(one of its 2 GPUs, 90% of the memory)"
    assert f"GPU 4 to 7, each: vllm-0 {share}, vllm-1 {share}" in text
    assert [sorted({"actor", "engine"} & {*use.residents}) for use in uses(plan)] == [["actor"], ["engine"]]

    asleep = planned(TrainConfig, [*keys, "memory_limit_gib=32"], device("h100", 8), shape=even)
    (use,) = uses(asleep)
    held = dict(zip((one.phase for one in asleep.instants), use.residents["engine"], strict=True))
    assert held["generate"] == pytest.approx(0.4 * asleep.machine.memory_gib) and held["update: actor"] < 1


def test_an_engine_of_our_own_on_another_gpu_is_no_part_of_the_first():
    keys = [*RL, "async_training=true", "rollout.max_head_offpolicyness=2"]
    apart = planned(TrainConfig, keys, device("h100", 2), shape=SMOLLM2)
    assert [sorted({"actor", "engine"} & {*use.residents}) for use in uses(apart)] == [["actor"], ["engine"]]
    together = planned(TrainConfig, keys, device("h100", 1), shape=SMOLLM2)
    assert together.peak_gib() > apart.peak_gib() + 1


@pytest.mark.parametrize(
    ("term", "requests", "reads"),
    [("judge(model=wise, votes=3, max_tokens=50)", 8 * 4 * 3, 190), ("compare(model=wise, max_tokens=50)", 8 * 4 * 4, 210)],
)
def test_a_judge_that_writes_has_an_engine_with_a_cache_and_no_pass_over_the_batch(term, requests, reads):
    keys = ["train_dataset.path=addition", "rollout.batch_size=8", "gconfig.n_samples=4", "rollout.engine.kv_cache_gib=0.5"]
    config = load_config(TrainConfig, None, [*keys, f"reward=math + {term}"]).config
    made = Plan(job_of(config, round_machine(), Lengths(10, 20), lambda _: SMOLLM2), round_machine())
    (writer,) = made.job.writers.values()
    assert (writer.sequences, writer.lengths) == (requests, Lengths(reads, 50))

    name = writer.role
    held = {one.phase: {i.what: i.num_bytes for i in one.items if i.role == name} for one in made.instants}
    weights = made.job.generator.weights
    assert all(items["parameters"] == weights for items in held.values())
    assert {phase for phase, items in held.items() if "KV cache" in items} == {f"score: {name}"}
    assert held[f"score: {name}"]["KV cache"] == pytest.approx(0.5 * 2**30, rel=0.02)


def test_lengths_come_from_the_rows_or_are_said_to_be_assumed(tmp_path):
    folder = tiny_model_folder(tmp_path)
    keys = [f"actor.path={folder}", "gconfig.max_new_tokens=32"]

    readable = load_config(TrainConfig, None, [*keys, "train_dataset.path=addition"]).config
    read = known_lengths(readable)
    missing = known_lengths(load_config(TrainConfig, None, [*keys, f"train_dataset.path={tmp_path}/no.jsonl"]).config)
    told = known_lengths(readable, prompt=7)

    assert 10 < read.lengths.prompt < 200 and read.lengths.longest == 32 and read.rows
    assert missing.lengths.prompt == PROMPT_TOKENS and missing.rows is None and "could not be read" in missing.source
    assert told.lengths == Lengths(7, 32)


def test_supervised_lengths_are_those_of_the_rows(tmp_path):
    folder = tiny_model_folder(tmp_path)
    known = known_lengths(load_config(SFTConfig, None, [f"actor.path={folder}", "train_dataset.path=addition"]).config)

    assert known.lengths.prompt > 10
    assert known.lengths.longest == 1024 - known.lengths.prompt


def job_with(*keys, machine=None):
    """The job of a configuration with these keys."""
    config = load_config(TrainConfig, None, [*RL, *keys]).config
    return job_of(config, machine or round_machine(), LENGTHS, lambda _: SMOLLM2)


def test_what_the_engine_refuses_has_no_plan():
    with pytest.raises(ConfigError, match=r"actor\.offload=true .* without a GPU"):
        job_with("actor.offload=true")
    with pytest.raises(ConfigError, match="9 heads on 3 key-value heads"):
        job_with("actor.backend=fsdp:d1t2")
    with pytest.raises(ConfigError, match=r"stage 1 of DeepSpeed .* computes in bfloat16, which is not supported"):
        job_with("actor.backend=deepspeed:zero1:d2", "actor.dtype=bfloat16")
    with pytest.raises(ConfigError, match="which no matrix of this model's layers ends with"):
        job_with("actor.lora.rank=4", "actor.lora.target_modules=[wrong]")


def test_the_reference_of_an_adapter_is_the_actor_itself_unless_it_has_own_keys():
    free = job_with("actor.lora.rank=4", "algorithm.kl.coefficient=0.1")
    own = job_with("actor.lora.rank=4", "algorithm.kl.coefficient=0.1", "reference.dtype=bfloat16")

    assert [model.own for model in free.models] == [True, False] and free.models[1].adapters is None
    assert [model.own for model in own.models] == [True, True] and own.models[1].dtype == "bfloat16"


def test_adapters_go_to_our_own_engines_alone_and_merged_to_others():
    delivered = 30 * 8 * (4 * 576 + 2 * (576 + 192) + 3 * (576 + 1536))
    assert job_with("actor.lora.rank=8").generator.adapter == delivered
    assert job_with("actor.lora.rank=8", "async_training=true").generator.adapter == delivered
    assert job_with("actor.lora.rank=8", "rollout.weights.channel=disk").generator.adapter == 0
    assert job_with("actor.lora.rank=8", "rollout.backend=tandem:d1").generator.adapter == 0
    assert job_with().generator.adapter == 0


def test_a_plan_refuses_servers_whose_devices_cannot_share_out_the_heads(capsys):
    keys = [
        "actor.path=smollm2-135m",
        "train_dataset.path=addition",
        "placement=decoupled",
        "--device",
        "h200",
        "--count",
        "8",
    ]
    assert main(["plan", "rollout.backend=vllm:d1t2", *keys]) == 2  # 9 heads
    assert (
        "vllm:d1t2 spreads each server over 2 devices" in (said := capsys.readouterr().err)
        and "possible: t1, t3, t9" in said
    )


def test_this_machine_is_known_without_measuring_it():
    here = this_machine(device="cpu", threads=1)

    assert here.kind == "cpu" and here.threads == 1 and here.name.endswith("1 thread")
    assert 0.5 < here.memory_gib <= psutil.virtual_memory().total / 2**30


@pytest.mark.parametrize("fits", [True, False])
def test_three_steps_of_the_run_itself_are_timed_if_they_fit(fits, tmp_path, monkeypatch, capfd):
    folder = tiny_model_folder(tmp_path)
    keys = [f"actor.path={folder}", "train_dataset.path=addition", "rollout.batch_size=2", "gconfig.max_new_tokens=8"]
    if not fits:
        monkeypatch.setattr("tandem.cli.planning.this_machine", lambda **_: round_machine(memory_gib=0.001))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    keys += ["evaluate.every_steps=1", "checkpoint.every_steps=1", "rollout.verify.every_steps=1"]

    assert main(["plan", *keys, "total_train_steps=50", "threads=1", "--measure", "--json"]) == (0 if fits else 1)

    said = capfd.readouterr()
    measured = json.loads(said.out)["measured"]
    assert ("step 3/50" in said.err) == fits and "eval" not in said.err, "evaluations are not timed"
    assert sorted(tmp_path.rglob("*")) == before
    assert bool(measured) == fits
    if fits:
        assert 0 < measured["generate_s"] + measured["train_s"] <= measured["step_s"] and measured["peak_gib"] > 0.1


def test_steps_that_fail_are_no_measurement(here, tmp_path, capfd):
    folder = tiny_model_folder(tmp_path)
    (tmp_path / "bad.py").write_text("def score(**_):\n    raise ValueError('no')\n")
    keys = [f"actor.path={folder}", "train_dataset.path=addition", f"reward={tmp_path}/bad.py:score", "threads=1"]

    assert main(["plan", *keys, "--measure"]) == 1
    assert "3 steps that were to be measured" in (said := capfd.readouterr().err) and "ValueError" in said


def test_every_device_has_sources_and_dense_peaks():
    for row in DEVICES.values():
        assert row.sources and row.bfloat16_tflops / row.float32_tflops <= 30
    with pytest.raises(ConfigError, match=r"--device h20 is not in the table; did you mean 'h200'\?"):
        device("h20")


def test_the_page_shows_the_table_of_devices():
    page = (Path(__file__).resolve().parents[2] / "docs/planning.md").read_text()
    for name, row in DEVICES.items():
        read = ", ".join(f"[{i}]({source})" for i, source in enumerate(row.sources, 1))
        peaks = f"{row.bfloat16_tflops:g} TFLOP/s | {row.float32_tflops:g} TFLOP/s"
        assert f"| `{name}` | {row.memory_gb:g} GB, {row.memory_gib:g} GiB | {peaks} | {read} |" in page
