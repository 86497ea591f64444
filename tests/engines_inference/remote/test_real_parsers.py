"""The commands of vLLM and SGLang servers, read by their own parsers.

``TANDEM_VLLM_PYTHON`` and ``TANDEM_SGLANG_PYTHON`` name the python of an environment that has the library. Of SGLang its
package and what `sglang.srt.server_args` imports are enough.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tandem.config.devices import Seat
from tandem.config.errors import ConfigError
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.build import option_words
from tandem.engines.inference.check import OURS_ALONE, check_options
from tandem.engines.inference.remote.foreign.in_server.tandem_sglang import own_words
from tandem.engines.inference.remote.foreign.server import StartTerms
from tandem.engines.inference.remote.foreign.sglang import SGLangServer
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tests.engines_inference.remote.test_handle_payloads import ALLOWED

PYTHON, SGLANG_PYTHON = os.environ.get("TANDEM_VLLM_PYTHON"), os.environ.get("TANDEM_SGLANG_PYTHON")
pytestmark = pytest.mark.slow
with_vllm = pytest.mark.skipif(not PYTHON, reason="TANDEM_VLLM_PYTHON names no python of an environment that has vLLM")
with_sglang = pytest.mark.skipif(
    not SGLANG_PYTHON, reason="TANDEM_SGLANG_PYTHON names no python of an environment that has SGLang"
)

PARSE = """
import json, sys
try:
    from vllm.entrypoints.launchers import cli_args
except ImportError:
    from vllm.entrypoints.openai import cli_args
parser = cli_args.make_arg_parser(cli_args.FlexibleArgumentParser())
read = [parser.parse_args(words) for words in json.load(sys.stdin)]
for one in read:
    cli_args.validate_parsed_serve_args(one)
print(json.dumps([vars(one) for one in read], default=str))
"""

PARSE_SGLANG = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import SafeUnpickler
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
known = sorted(word for action in parser._actions for word in action.option_strings)
read = [vars(parser.parse_args(words)) for words in json.load(sys.stdin)]
print(json.dumps([read, known, [" ".join(one) for one in SafeUnpickler.ALLOWED_GLOBALS]], default=str))
"""

SETTINGS = EmbeddedEngineConfig(max_running=24, max_model_len=512)
TERMS = [
    StartTerms(str(PYTHON), Path("/model"), "float32", "cpu", SETTINGS, (0, 1)),
    StartTerms(str(PYTHON), Path("/model"), "bfloat16", "cuda", EmbeddedEngineConfig(), ()),
    StartTerms(str(PYTHON), Path("/model"), "bfloat16", "cuda", SETTINGS, (), Seat("vllm-0", (2, 3), 0.4), True),
]
OPTIONS = {"enforce-eager": True, "quantization": "fp8", "max-num-batched-tokens": 4096}


def parsed(python, script, commands):
    """The values that a script in another environment reads in these commands."""
    done = subprocess.run(
        [str(python), "-c", script], input=json.dumps(commands), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@with_sglang
def test_sglang_reads_the_commands_of_its_servers_as_they_are_meant():
    commands = [own_words(SGLangServer.command(terms, 8123)[0], lambda: (60 << 30, 80 << 30)) for terms in TERMS]
    options = option_words({"chunked-prefill-size": 4096, "disable-overlap-schedule": True})
    read, known, allowed = parsed(SGLANG_PYTHON, PARSE_SGLANG, [[*words[2:], *options] for words in commands])

    for found, terms in zip(read, TERMS, strict=True):
        assert (found["model_path"], found["device"], found["dtype"]) == ("/model", terms.device, terms.dtype)
        assert (found["host"], found["port"], found["random_seed"]) == ("127.0.0.1", 8123, 8123)
        assert found["max_running_requests"] == terms.settings.max_running
        assert found["context_length"] == terms.settings.max_model_len
        assert found["skip_server_warmup"] is found["enable_metrics"] is True
        assert (found["chunked_prefill_size"], found["disable_overlap_schedule"]) == (4096, True)
    assert [found["tp_size"] for found in read] == [1, 1, 2] and read[2]["mem_fraction_static"] == pytest.approx(
        0.4 * 80 / 60, abs=1e-4
    )
    assert [found["enable_memory_saver"] for found in read] == [False, False, True]
    cpu = read[0]
    assert (cpu["attention_backend"], cpu["sampling_backend"], cpu["sleep_on_idle"]) == ("torch_native", "pytorch", True)
    assert cpu["disable_cuda_graph"] is cpu["disable_radix_cache"] is True and cpu["max_total_tokens"] == 32768
    assert {f"--{word}" for word in OURS_ALONE["sglang"].split()} <= {*known}, "what the run gives itself are options"
    assert {*allowed} >= ALLOWED, "it may call what handles of GPU memory are written with"


@with_vllm
def test_vllm_reads_the_commands_of_its_servers_as_they_are_meant():
    commands = [VllmServer.command(terms, 8123)[0] for terms in TERMS]
    assert [words[:3] for words in commands] == 3 * [[PYTHON, "-m", "vllm.entrypoints.openai.api_server"]]
    read = parsed(PYTHON, PARSE, [[*words[3:], *option_words(OPTIONS)] for words in commands])

    for found, terms in zip(read, TERMS, strict=True):
        assert (found["model"], found["served_model_name"]) == ("/model", ["policy"])
        assert (found["host"], found["port"], found["seed"]) == ("127.0.0.1", 8123, 8123)
        assert (found["dtype"], found["max_num_seqs"]) == (terms.dtype, terms.settings.max_running)
        assert found["max_model_len"] == (terms.settings.max_model_len or -1), "auto: what its cache holds"
        assert found["logprobs_mode"] == "processed_logprobs" and found["enable_scale_out"] is True
        assert found["worker_extension_cls"].startswith("tandem_") and len(found["middleware"]) == 1
        assert (found["enforce_eager"], found["quantization"], found["max_num_batched_tokens"]) == (True, "fp8", 4096)
    assert [found["tensor_parallel_size"] for found in read] == [1, 1, 2]
    assert read[2]["gpu_memory_utilization"] == 0.4 != read[1]["gpu_memory_utilization"]
    assert [found["enable_sleep_mode"] for found in read] == [False, False, True]


@with_vllm
def test_options_are_checked_against_what_vllm_lists_itself():
    check_options("vllm", str(PYTHON), OPTIONS)
    with pytest.raises(ConfigError, match=r"options\.enforce-eagr is no option of vllm servers; did you mean .*eager"):
        check_options("vllm", str(PYTHON), {"enforce-eagr": True})


@with_vllm
def test_what_the_run_gives_itself_are_options_of_vllm(monkeypatch):
    ours = OURS_ALONE["vllm"].split()
    monkeypatch.setitem(OURS_ALONE, "vllm", "")
    check_options("vllm", str(PYTHON), dict.fromkeys(ours, 1))
