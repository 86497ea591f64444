"""What the libraries below torch are told before they are loaded, in fresh interpreters."""

import os
import subprocess
import sys

import pytest

from tandem.config.libraries import SETTINGS, of_others
from tests.tiny import tiny_model_folder

TRAINING = """
import random, sys
from pathlib import Path
import torch
from tandem.models.allocator import keep_freed_memory
from tests.engines_train.steps import engine_on, random_batch, weighted_nll

def resident_mib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS:")).split()[1]) // 1024

torch.set_num_threads(1)
keep_freed_memory()
engine = engine_on(Path(sys.argv[1]), dtype="bfloat16", max_tokens=300)
draw = random.Random(0)
for step in range(21):
    engine.train_batch(random_batch([draw.randrange(4, 150) for _ in range(16)], seed=step), weighted_nll)
    if step % 10 == 0:
        print(resident_mib())
"""
"""Steps in bfloat16 with ever new lengths, on any CPU; MiB after 1, 11 and 21 of them."""


def fresh(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs lines in an interpreter that has none of our settings but these."""
    inherited = {name: value for name, value in os.environ.items() if name not in SETTINGS and name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env={**inherited, **environment})


def spins(script: str, **environment: str) -> str:
    """The number of looks before a waiting thread sleeps, in the words of torch's OpenMP."""
    said = fresh(script, OMP_DISPLAY_ENV="verbose", **environment).stderr
    found = [line.split("'")[1] for line in said.splitlines() if "GOMP_SPINCOUNT" in line]
    if not found:
        pytest.skip("torch's OpenMP is not GNU's here")
    return found[0]


@pytest.mark.slow
@pytest.mark.invariant
def test_threads_that_wait_sleep_soon_wherever_tandem_is_imported_before_torch():
    assert spins("import tandem, torch") == "10000"
    assert spins("import tandem.engines.inference.child") == "10000"
    assert spins("import tandem, torch", GOMP_SPINCOUNT="77") == "77"
    assert spins("import tandem, torch", OMP_WAIT_POLICY="passive") == "0"
    assert spins("import torch, tandem") != "10000"


@pytest.mark.slow
@pytest.mark.invariant
def test_doctor_says_that_torch_was_imported_too_early():
    ask = "import sys\nfrom tandem.cli.main import main\nmain(['doctor'])"
    words = "import tandem before torch"

    assert words not in fresh(ask).stdout
    assert words in fresh(f"import torch\n{ask}").stdout
    assert words not in fresh(f"import torch\n{ask}", GOMP_SPINCOUNT="10000").stdout


def test_a_server_of_another_environment_gets_what_the_user_set_and_not_what_we_did():
    ours = {name: setting.value for name, setting in SETTINGS.items()}
    assert of_others({**ours, "HOME": "/home/x"}) == {"HOME": "/home/x"}
    assert of_others({"GOMP_SPINCOUNT": "77"}) == {"GOMP_SPINCOUNT": "77"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_of_training_in_bfloat16_does_not_rise_with_lengths_not_seen_before(tmp_path):
    folder = tiny_model_folder(tmp_path, hidden_size=256, intermediate_size=512)

    first, *later = (int(size) for size in fresh(TRAINING, str(folder)).stdout.split())

    assert max(later) - first < 80  # MiB; with the libraries' own caches 800 on a CPU that multiplies bfloat16


ONCE_TORCH_COMES = """
import os, sys

class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print({key: value for key, value in os.environ.items() if key.endswith("ALLOC_CONF")})
            sys.exit()

sys.meta_path.insert(0, Look())
"""


@pytest.mark.parametrize(
    "way", ["import tandem.flow.process", "from tandem import load_config, Actor", "import tandem.__main__"]
)
def test_blocks_of_a_gpu_may_grow_by_the_time_torch_is_imported(way):
    run = f"{ONCE_TORCH_COMES}{way}\nimport torch"
    assert fresh(run).stdout.strip() == "{'PYTORCH_ALLOC_CONF': 'expandable_segments:True'}"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # torch reads both
        own = {name: "max_split_size_mb:64"}
        assert fresh(run, **own).stdout.strip() == str(own), "the user's stays alone"
