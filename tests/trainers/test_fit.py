"""A start refuses engines and trainers that cannot lie in the memory of the GPUs, with the figures and a way out."""

import logging
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM

from tandem.cli.main import main
from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.engines.train.micro_batches import PlannedSequence, plan
from tandem.models.shape import Shape
from tandem.planning.fit import check_fit, fitting
from tandem.planning.machine import gpus
from tandem.planning.memory import GIB
from tandem.trainers.start import check_gpus, with_micro_batches
from tests.tiny import tiny_config
from tests.trainers.planning import LLAMA_8B, SMOLLM2, round_machine

RL = ["train_dataset.path=addition", "actor.path=m", "device=cuda", "actor.dtype=bfloat16", "rollout.dtype=bfloat16"]


def fits(keys, machine, shape, cls=TrainConfig):
    check_fit(load_config(cls, None, keys).config, machine, lambda path: shape)


# backend, layout, GPUs, GiB of each, model → words of the refusal, or None
TABLE = [
    ("embedded", "fsdp:d1", 1, 80, SMOLLM2, None),
    ("embedded", "fsdp:d1", 1, 2, SMOLLM2, "GPU 0 has 2.00 GiB"),
    ("embedded", "fsdp:d1", 1, 80, LLAMA_8B, "GPU 0 has 80.00 GiB"),
    ("embedded", "fsdp:d8", 8, 80, LLAMA_8B, None),
    ("vllm:d1", "fsdp:d1", 1, 80, SMOLLM2, None),
    ("vllm:d1", "fsdp:d1", 1, 4, SMOLLM2, None),
    ("vllm:d1", "fsdp:d1", 1, 2.8, SMOLLM2, "engine 0.25"),
    ("vllm:d4t2", "fsdp:d8", 8, 20, LLAMA_8B, "engine 7.48"),
    ("vllm:d4t2", "fsdp:d8", 8, 80, LLAMA_8B, None),
]


@pytest.mark.parametrize(("backend", "layout", "count", "gib", "shape", "expected"), TABLE)
def test_what_cannot_fit_is_refused_at_start(backend, layout, count, gib, shape, expected):
    keys = [*RL, f"rollout.backend={backend}", f"actor.backend={layout}"]
    if expected is None:
        fits(keys, gpus("GPU", gib, count), shape)
        return
    with pytest.raises(ConfigError, match="this run does not fit") as refused:
        fits(keys, gpus("GPU", gib, count), shape)
    assert expected in str(refused.value)


def test_a_refusal_says_what_is_largest_and_what_makes_it_smaller():
    with pytest.raises(ConfigError, match=r"Most of it is weights, [\d.]+ GiB; what helps: more ranks"):
        fits(RL, gpus("GPU", 80, 1), LLAMA_8B)


def test_a_server_that_can_sleep_is_told_to():
    keys = [*RL, "rollout.backend=vllm:d1"]
    with pytest.raises(ConfigError, match=r"With rollout\.fleet\.sleep=true the server gives its memory back"):
        fits([*keys, "rollout.fleet.sleep=false"], gpus("GPU", 4, 1), SMOLLM2)
    keys = [*keys, "rollout.fleet.memory_share=0.6"]
    with pytest.raises(ConfigError, match="With memory_limit_gib=3 models and server give memory back in turns"):
        fits(keys, gpus("GPU", 4, 1), SMOLLM2)
    fits([*keys, "memory_limit_gib=3"], gpus("GPU", 4, 1), SMOLLM2)


def test_supervised_runs_are_asked_too():
    keys = ["train_dataset.path=addition", "actor.path=m", "device=cuda"]
    with pytest.raises(ConfigError, match="actor 1"):
        fits(keys, gpus("GPU", 40, 1), LLAMA_8B, SFTConfig)


def test_what_the_plan_only_guesses_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        fits([*RL, "actor.max_tokens_per_micro_batch=131072"], gpus("GPU", 4, 1), SMOLLM2)
    assert "it may run out of memory" in caplog.text


QWEN_1_5B = Shape("qwen2", 28, 1536, 8960, 12, 2, 128, 151936, 32768, tied=True)
LONG = ["gconfig.n_samples=8", "gconfig.max_new_tokens=4096", "rollout.batch_size=64", "rollout.backend=vllm:d1"]


def fitted(keys, machine, shape=QWEN_1_5B):
    config = load_config(TrainConfig, None, [*RL, *LONG, *keys]).config
    return fitting(config, machine, lambda path: shape)


def test_micro_batches_are_as_large_as_the_gpu_allows_and_share_prompts():
    recomputed = "actor.gradient_checkpointing=true"
    tokens = fitted([recomputed], gpus("GPU", 80, 1)).max_tokens_per_micro_batch
    samples = [PlannedSequence(prompt, 1024, 4096) for prompt in range(64) for _ in range(8)]

    def computed(most):
        batches = plan(samples, most, 1)[0]
        return sum(4096 * len(batch) + 1024 * len({samples[i].prompt for i in batch}) for batch in batches)

    assert computed(tokens) <= 2_200_000 < 2_600_000 < computed(4096)
    selective = fitted([recomputed, "actor.selective_checkpointing=true"], gpus("GPU", 80, 1))
    assert 8192 <= selective.max_tokens_per_micro_batch < tokens
    assert fitted([recomputed], gpus("GPU", 40, 1)).max_tokens_per_micro_batch < tokens


def test_chunks_of_logits_take_a_part_of_the_gpu_where_they_fit():
    recomputed = "actor.gradient_checkpointing=true"
    found = [fitted([recomputed], gpus("GPU", memory, 1)).logprob_chunk_tokens for memory in (80, 44, 30)]
    assert found == [80 * GIB // (32 * 4 * 151936), 44 * GIB // (32 * 4 * 151936), 1024]
    assert fitted([recomputed, "actor.logprob_chunk_tokens=64"], gpus("GPU", 80, 1)).logprob_chunk_tokens == 64


def test_micro_batches_that_were_written_or_are_a_cpus_stay_as_they_are():
    assert fitted(["actor.max_tokens_per_micro_batch=5000"], gpus("GPU", 80, 1)).max_tokens_per_micro_batch == 5000
    config = load_config(TrainConfig, None, ["train_dataset.path=addition", "device=cpu"]).config
    assert fitting(config, round_machine()) == config.actor and config.actor.micro_batch_tokens == 4096


def test_gradients_are_summed_with_each_micro_batch_where_whole_ones_do_not_fit():
    keys = ["actor.backend=fsdp:d8", "actor.gradient_checkpointing=true"]
    large = replace(LLAMA_8B, layers=80, hidden=8192, intermediate=28672, heads=64)
    small, whole, written = (
        fitted([*keys, *more], gpus("GPU", 180, 8), shape)
        for shape, more in ((LLAMA_8B, []), (large, []), (large, ["actor.gradient_sync=step"]))
    )
    assert [small.gradient_sync, whole.gradient_sync, written.gradient_sync] == [None, "micro_batch", "step"]


def test_micro_batches_fit_whatever_prompts_come_and_the_plan_has_those_of_the_run(tmp_path, monkeypatch, capsys):
    machine = gpus("GPU", 40, 1)
    folder = tmp_path / "model"
    tiny_config("llama", hidden_size=1536, intermediate_size=8960, num_hidden_layers=28).save_pretrained(folder)
    keys = [f"actor.path={folder}", *RL[:1], "actor.dtype=bfloat16", "gconfig.max_new_tokens=64", "gconfig.n_samples=4"]
    config = load_config(TrainConfig, None, [*keys, "rollout.batch_size=2"]).config
    run = fitting(config, machine)
    assert run.max_tokens_per_micro_batch < 40960, "a step of short prompts has far fewer tokens, and would fit at once"
    monkeypatch.setattr("tandem.cli.planning.this_machine", lambda **_: machine)
    for prompt in (50, 4000):
        given = [*keys, "rollout.batch_size=2", "--prompt-tokens", str(prompt)]
        main(["plan", *given])
        assert f"at most {run.max_tokens_per_micro_batch} tokens each" in capsys.readouterr().out


def test_the_plan_sums_gradients_as_the_run_will(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "model"
    tiny_config("llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32).save_pretrained(folder)
    machine = gpus("GPU", 18, 8)
    keys = [f"actor.path={folder}", "train_dataset.path=addition", "actor.backend=fsdp:d8", "actor.dtype=bfloat16"]
    monkeypatch.setattr("tandem.cli.planning.this_machine", lambda **_: machine)
    keys += ["actor.gradient_checkpointing=true", "batch_size=256"]
    assert fitting(load_config(SFTConfig, None, keys).config, machine).gradient_sync == "micro_batch"
    assert main(["plan", *keys, "--for", "sft"]) == 0 and "It fits" in capsys.readouterr().out
    assert main(["plan", *keys, "actor.gradient_sync=step", "--for", "sft"]) == 1


def test_a_model_whose_memory_cannot_be_counted_trains_and_its_plan_says_so(tmp_path, monkeypatch, capsys, caplog):
    def refuse(*_, **__):
        raise TypeError("unexpected argument of this version")

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", refuse)
    folder = tmp_path / "model"
    tiny_config("llama", hidden_size=72, intermediate_size=136).save_pretrained(folder)  # sizes that no other test counts
    keys = [f"actor.path={folder}", *RL[:1], "gconfig.max_new_tokens=8"]
    config = load_config(TrainConfig, None, keys).config
    monkeypatch.setattr("tandem.trainers.start.choose_device", lambda *_: "cuda:0")
    monkeypatch.setattr("tandem.trainers.start.this_machine", lambda **_: gpus("GPU", 80, 1))
    with caplog.at_level(logging.WARNING):
        assert with_micro_batches(config) is config and check_gpus(config) is None
    reason = "the memory of a model of type llama cannot be planned: its layers do not run on tensors without memory"
    assert [reason in message for message in caplog.messages] == [True, True]
    assert main(["plan", *keys]) == 2 and reason in capsys.readouterr().err
