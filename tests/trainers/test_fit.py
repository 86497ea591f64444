"""A start refuses engines and trainers that cannot lie in the memory of the GPUs, with the figures and a way out."""

import logging
import re

import pytest

from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.planning.fit import check_fit
from tandem.planning.machine import gpus
from tests.trainers.planning import LLAMA_8B, SMOLLM2

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


def test_the_nearest_change_of_a_refusal_is_one_that_fits():
    with pytest.raises(ConfigError) as refused:
        fits(RL, gpus("GPU", 80, 1), LLAMA_8B)
    change = re.search(r"Nearest change that fits: ([^ ].*)", str(refused.value)).group(1).split()
    fits([*RL, *change], gpus("GPU", 80, 1), LLAMA_8B)


def test_a_server_that_can_sleep_is_told_to():
    keys = [*RL, "rollout.backend=vllm:d1"]
    with pytest.raises(ConfigError, match=r"rollout\.fleet\.sleep=true, with which the server gives its memory back"):
        fits([*keys, "rollout.fleet.sleep=false"], gpus("GPU", 4, 1), SMOLLM2)
    keys = [*keys, "rollout.fleet.memory_share=0.6"]
    with pytest.raises(ConfigError, match="memory_limit_gib=3, with which models and server give memory back in turns"):
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
