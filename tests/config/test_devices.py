"""Which GPUs of a machine the ranks of training and the servers use: a table, and what is refused."""

import argparse
import sys
from pathlib import Path

import pytest
import torch

from tandem.cli.serve import SERVE
from tandem.config.devices import Seat, devices_of, visible
from tandem.config.errors import ConfigError
from tandem.config.fleet import FleetConfig
from tandem.config.rollout import EmbeddedEngineConfig, RolloutConfig
from tandem.engines.inference import check
from tandem.engines.inference.build import option_words
from tandem.engines.inference.check import check_inference_engine, check_options
from tandem.engines.inference.remote.foreign.in_server.tandem_sglang import own_words
from tandem.engines.inference.remote.foreign.server import StartTerms
from tandem.engines.inference.remote.foreign.sglang import SGLangServer
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tandem.engines.inference.remote.tandem_server import server_command
from tests.tiny import tiny_model_folder

# backend, ranks, devices, placement → devices of each server, or words of the refusal
TABLE = [
    ("embedded", 1, 1, "colocate", {}),
    ("embedded", 1, 1, "decoupled", {"embedded-0": (0,)}),
    ("embedded", 1, 2, "decoupled", {"embedded-0": (1,)}),
    ("embedded", 4, 4, "colocate", {}),
    ("embedded", 4, 4, "decoupled", {"embedded-0": (0,)}),
    ("embedded", 4, 8, "decoupled", {"embedded-0": (4,)}),
    ("embedded", 2, 1, "colocate", "2 ranks of training need 2 GPUs on this machine, and there are 1"),
    ("embedded:d1", 1, 1, "colocate", {"embedded-0": (0,)}),
    ("embedded:d2", 2, 4, "decoupled", {"embedded-0": (2,), "embedded-1": (3,)}),
    ("embedded:d2", 1, 2, "decoupled", "training has 1 of the 2 GPUs on this machine, so 1 are left"),
    ("tandem:d1", 1, 1, "colocate", {"tandem-0": (0,)}),
    ("tandem:d3", 1, 4, "decoupled", {"tandem-0": (1,), "tandem-1": (2,), "tandem-2": (3,)}),
    ("tandem:d1", 1, 1, "decoupled", "so 0 are left"),
    ("vllm:d1", 1, 1, "colocate", {"vllm-0": (0,)}),
    ("vllm:d1", 1, 1, "decoupled", "servers need 1 × 1 (vllm:d1) = 1 GPUs of their own"),
    ("vllm:d1", 1, 2, "decoupled", {"vllm-0": (1,)}),
    ("vllm:d2", 2, 2, "colocate", {"vllm-0": (0,), "vllm-1": (1,)}),
    ("vllm:d2", 1, 4, "colocate", "one server on each, and training has 1 on this machine"),
    ("vllm:d1t2", 2, 2, "colocate", {"vllm-0": (0, 1)}),
    ("vllm:d1t2", 2, 4, "decoupled", {"vllm-0": (2, 3)}),
    ("vllm:d2t2", 4, 4, "colocate", {"vllm-0": (0, 1), "vllm-1": (2, 3)}),
    ("vllm:d2t2", 4, 8, "decoupled", {"vllm-0": (4, 5), "vllm-1": (6, 7)}),
    ("vllm:d4t2", 4, 8, "decoupled", "servers need 4 × 2 (vllm:d4t2) = 8 GPUs of their own"),
    ("vllm:d4t2", 8, 8, "colocate", {f"vllm-{i}": (2 * i, 2 * i + 1) for i in range(4)}),
    ("vllm:d1t8", 8, 8, "colocate", {"vllm-0": tuple(range(8))}),
    ("sglang:d1", 1, 1, "colocate", {"sglang-0": (0,)}),
    ("sglang:d6", 2, 8, "decoupled", {f"sglang-{i}": (2 + i,) for i in range(6)}),
    ("sglang:d1t4", 4, 8, "decoupled", {"sglang-0": (4, 5, 6, 7)}),
    ("tandem:d1+vllm:d1t2", 1, 4, "decoupled", {"tandem-0": (1,), "vllm-0": (2, 3)}),
    ("vllm:d1+vllm:d1t2", 1, 4, "decoupled", {"vllm-0": (1,), "vllm-1": (2, 3)}),
    ("attached", 8, 8, "decoupled", {}),
    ("vllm:d2t4", 0, 8, "colocate", {"vllm-0": (0, 1, 2, 3), "vllm-1": (4, 5, 6, 7)}),
    ("vllm:d2t4", 0, 4, "colocate", "servers need 2 × 4 (vllm:d2t4) = 8 GPUs of their own, and there are 4 on this machine"),
]


def parsed(module, *words):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(words)


def command_of(kind, seat):
    """The command of a server as the run gives it; that of our own is read by its own parser."""
    if kind != "tandem":
        return command({"vllm": VllmServer, "sglang": SGLangServer}[kind], seat)
    words = server_command(
        Path("model"), EmbeddedEngineConfig(), torch.bfloat16, f"cuda:{seat.devices[0]}", "run", Path("."), []
    )
    after = words[words.index("tandem") + 1 :]
    assert parsed(SERVE, *after[1:]).device == "cuda"
    return " ".join(after)


@pytest.mark.parametrize(("backend", "ranks", "devices", "placement", "expected"), TABLE)
def test_who_is_on_which_device(backend, ranks, devices, placement, expected):
    rollout = RolloutConfig(backend=backend)
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as refused:
            devices_of(rollout, placement, ranks=ranks, devices=devices)
        assert expected in str(refused.value)
        return
    found = devices_of(rollout, placement, ranks=ranks, devices=devices)
    assert [seat.devices for seat in found.ranks] == [(rank,) for rank in range(ranks)]
    assert {seat.name: seat.devices for seat in found.servers} == expected
    alone = placement == "decoupled" or ranks == 0
    share = 0.9 if alone else 0.4
    for seat in found.servers:
        kind, _, _ = seat.name.partition("-")
        number = len(expected[seat.name])
        words = {
            "embedded": "",
            "tandem": "--device cuda",
            "vllm": f"--tensor-parallel-size {number} --gpu-memory-utilization {share}",
            "sglang": f"--tp-size {number} --memory-share {share}",
        }
        assert visible(seat.devices, {}) == ",".join(map(str, expected[seat.name]))
        assert kind == "embedded" or words[kind] in command_of(kind, seat)


def test_what_is_said_of_the_devices():
    rollout = RolloutConfig(backend="vllm:d1t2", fleet=FleetConfig(memory_share=0.3))
    (server,) = devices_of(rollout, "colocate", ranks=2, devices=2).servers
    assert server.words() == "vllm-0 (one of its 2 GPUs, 30% of the memory)"


def test_devices_have_the_names_that_the_environment_gives_them():
    assert visible((1, 2), {}) == "1,2"
    assert visible((0, 2), {"CUDA_VISIBLE_DEVICES": "4,5,GPU-8a"}) == "4,GPU-8a"
    with pytest.raises(ConfigError, match="names no device for number 2"):
        visible((2,), {"CUDA_VISIBLE_DEVICES": "4,5"})


def command(server, seat):
    terms = StartTerms("python", Path("model"), "bfloat16", "cuda", EmbeddedEngineConfig(), (), seat)
    words, _ = server.command(terms, 8000)
    return " ".join(words)


def test_a_servers_command_names_its_devices_and_their_share():
    seat = Seat("one", (2, 3), 0.4)
    assert "--tensor-parallel-size 2 --gpu-memory-utilization 0.4" in command(VllmServer, seat)
    assert "--tp-size 2 --memory-share 0.4" in command(SGLangServer, seat)
    assert "--gpu-memory-utilization" not in command(VllmServer, None)


@pytest.mark.slow
@pytest.mark.invariant
def test_options_of_servers_are_asked_of_their_own_command():
    assert option_words({"enforce-eager": True, "quick": False, "seed": 3}) == ["--enforce-eager", "--seed", "3"]
    with pytest.raises(ConfigError, match=r"options\.max-reqests is no option of tandem servers; did you mean"):
        check_options("tandem", sys.executable, {"max-reqests": 12})
    with pytest.raises(ConfigError, match=r"options\.port is given to tandem servers by the run itself"):
        check_options("tandem", sys.executable, {"port": 1})


def test_a_probe_that_fails_or_hangs_twice_fails_no_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(check, "HELP_S", 0.3)
    for number, (line, word) in enumerate([("echo no memory >&2; exit 1", "no memory"), ("sleep 5", "timed out")]):
        python = tmp_path / f"python{number}"
        python.write_text(f"#!/bin/sh\necho x >> {tmp_path}/asked\n{line}\n")
        python.chmod(0o755)
        caplog.clear()
        check_options("vllm", str(python), {"enforce-eager": True})
        assert "rollout.fleet.options could not be checked" in caplog.text and word in caplog.text
        assert len((tmp_path / "asked").read_text().split()) == 2 * (number + 1)


def test_answers_that_the_context_cannot_hold_are_told_with_both_numbers(tmp_path, caplog):
    room = check.context_of(EmbeddedEngineConfig(), tiny_model_folder(tmp_path))
    check.warn_of_cut(room - 10, room, 10)
    assert caplog.text == ""
    check.warn_of_cut(5000, room, 10)
    assert "max_new_tokens=5000, but the context of 512 tokens leaves at most 502 for an answer" in caplog.text
    assert check.context_of(EmbeddedEngineConfig(max_model_len=100), tmp_path / "nowhere") == 100


def test_servers_whose_devices_cannot_share_out_the_heads_are_refused(tmp_path):
    model = tiny_model_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"vllm:d1t3 spreads each server over 3 devices.* possible: t1"):
        check_inference_engine(RolloutConfig(backend="vllm:d1t3"), model, "cuda")


@pytest.mark.parametrize("free_gib", [78, 60, 36])
def test_sglang_takes_the_same_bytes_whatever_is_free_when_it_starts(free_gib):
    words = own_words(["--tp-size", "1", "--memory-share", "0.4", "--x"], lambda: (free_gib << 30, 80 << 30))
    assert words[:3] + words[4:] == ["--tp-size", "1", "--mem-fraction-static", "--x"]
    assert float(words[3]) * free_gib == pytest.approx(0.4 * 80, abs=0.01)  # GiB: SGLang's part is of what is free


def test_sglang_does_not_start_where_its_bytes_are_not_free():
    with pytest.raises(SystemExit, match=r"40% of the GPU's memory are 32 GiB, and 30 GiB are free: 2 GiB are missing"):
        own_words(["--memory-share", "0.4"], lambda: (30 << 30, 80 << 30))
    assert own_words(["--mem-fraction-static", "0.1"], lambda: pytest.fail("a CPU is not asked")) == [
        "--mem-fraction-static",
        "0.1",
    ]
