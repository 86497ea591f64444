"""The decode kernel of GPUs, by Triton's interpreter and compiler on a CPU, in an environment of its own
(scripts/triton_env.sh), which has another NumPy than Tandem's. No GPU has run it."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("TANDEM_TRITON", ROOT / "envs/triton")) / "bin/python"
CASES, PROCESSES = 200, 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no environment with triton: sh scripts/triton_env.sh makes it"),
]


def begun(*words, interpreted=True):
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    command = [PYTHON, "-m", "tests.engines_inference.paged_cases", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(*processes):
    try:
        said = [process.communicate(timeout=280) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * len(processes), [errors[-2000:] for _, errors in said]
    return [json.loads(answer.splitlines()[-1]) for answer, _ in said]


def test_the_kernel_is_as_exact_as_flash_attention_and_loads_each_key_once():
    processes = [begun("cases", number, PROCESSES) for number in range(PROCESSES)]
    cases = [case for found in ended(*processes) for case in found]
    long = [case for case in cases if case["keys"] > 1000]
    assert len(cases) == CASES and len(long) == 60 and max(case["keys"] for case in long) == 5000
    for case in cases:
        assert case["written"], case
        limit = case["largest"] / 256 if case["capped"] else case["flash"]  # flash knows no soft-caps: a rounding then
        assert case["error"] <= max(limit, 1e-5 * case["largest"]), case
        if case["dtype"] == "float32":
            assert case["error"] <= 1e-5 * max(1.0, case["largest"]), case
    for some in (cases, long):
        assert sum(case["loaded"] for case in some) <= 1.2 * sum(case["attended"] for case in some)


def test_the_engine_draws_the_same_with_the_kernel_as_without():
    (answers,) = ended(begun("engine"))
    for kind, (ordinary, paged) in answers.items():
        assert [tokens for tokens, _ in paged] == [tokens for tokens, _ in ordinary], kind
        for (_, found), (_, expected) in zip(paged, ordinary, strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=0)


def test_the_kernels_compile_for_ampere_and_hopper_and_load_16_bytes_at_a_time():
    (found,) = ended(begun("compile", interpreted=False))
    assert len(found) == 6
    for one in found:
        assert one["shared"] <= 99 * 1024, "the smallest of these GPUs has that much"
        assert one["wide"] > 0 or one["name"] == "_join"
