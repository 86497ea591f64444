"""What a process of a run settles before CUDA is asked for anything, with a GPU that is pretended."""

import os

import pytest
import torch

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.process import start_process

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def first_call(monkeypatch):
    """``first_call(keys)``: the workspace of cuBLAS and the settings of torch's allocator at the first call of CUDA."""
    seen, settings = [], []
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((os.environ.get(WORKSPACE), [*settings])))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    threads = torch.get_num_threads()

    def start(*keys):
        start_process(load_config(TrainConfig, None, ["actor.path=somewhere", "train_dataset.path=addition", *keys]).config)
        return seen[0]

    yield start
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def test_a_deterministic_run_gives_cublas_a_workspace_of_its_own(first_call):
    assert first_call("deterministic=true")[0] == ":4096:8"


def test_a_workspace_that_the_user_chose_stays(first_call, monkeypatch):
    monkeypatch.setenv(WORKSPACE, ":16:8")
    assert first_call("deterministic=true")[0] == ":16:8"


def test_any_other_run_leaves_cublas_and_the_allocator_alone(first_call):
    assert first_call() == (None, [])


def test_weights_that_are_handed_over_by_handles_lie_in_blocks_that_have_one(first_call):
    keys = "rollout.backend=vllm:d1", "rollout.weights.channel=ipc", "placement=colocate"
    assert first_call(*keys)[1] == ["expandable_segments:False"]
