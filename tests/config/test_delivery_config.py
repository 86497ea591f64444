"""What `rollout.weights` and `rollout.verify` may say."""

import pytest

from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.start import check_weights_folder


def config(*items):
    return load_config(TrainConfig, None, ["train_dataset.path=addition", *items]).config


def load(*items):
    return config(*items).rollout


IPC = "rollout.weights.channel=ipc"


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["rollout.weights.channel=collective"], "collective is for one embedded engine .* placement=decoupled"),
        (["rollout.weights.channel=collective", "rollout.backend=embedded:d2"], "and here rollout.backend=embedded:d2"),
        (["rollout.weights.channel=collective", "rollout.backend=vllm:d1+tandem:d1"], "vLLM and SGLang servers only"),
        (["rollout.weights.channel=collective", "rollout.backend=attached"], "vLLM and SGLang servers only"),
        (
            [IPC],
            "for one server that the run starts .* here rollout.backend=auto with placement=colocate",
        ),
        ([IPC, "rollout.backend=vllm:d2"], "and here rollout.backend=vllm:d2"),
        ([IPC, "rollout.backend=vllm:d1", "placement=decoupled"], "vllm:d1 with placement=decoupled"),
        ([IPC, "rollout.backend=vllm:d1", "rollout.weights.folder=/tmp/x"], "no server reads weights from a disk"),
        (
            [IPC, "rollout.backend=vllm:d1", "rollout.fleet.watch=/x"],
            "watch=/x lets servers join, and .* leave one",
        ),
        (["rollout.weights.channel=floppy"], "rollout.weights.channel"),
        (["rollout.weights.folder=/tmp/x"], "no server reads weights from a disk: set rollout.weights.channel=disk"),
        (
            ["rollout.weights.channel=collective", "rollout.backend=vllm:d1", "rollout.weights.folder=/tmp/x"],
            "no server reads weights from a disk",
        ),
        (["rollout.weights.folder="], "rollout.weights.folder is empty"),
        (["rollout.verify.every_steps=0"], "rollout.verify.every_steps must be a whole number, at least 1, got 0"),
        (["rollout.verify.tolerance=0"], "rollout.verify.tolerance must be a number, above 0"),
        (["rollout.verify.every_steps=null", "rollout.verify.tolerance=1"], "nothing is verified"),
    ],
)
def test_what_cannot_work_or_would_not_be_read_is_refused(items, words):
    with pytest.raises(ConfigError, match=words):
        load(*items)


def test_what_can_is_not():
    assert load("rollout.weights.channel=disk", "rollout.weights.folder=/tmp/x").weights.folder == "/tmp/x"
    assert load("rollout.backend=vllm:d1", "rollout.weights.folder=/tmp/x").weights.channel == "auto"
    assert load("rollout.weights.channel=collective", "placement=decoupled").weights.channel == "collective"
    assert load("rollout.weights.channel=collective", "rollout.backend=vllm:d2+sglang:d1").weights.channel == "collective"
    assert load(IPC, "rollout.backend=vllm:d1").weights.channel == load(IPC, "rollout.backend=sglang:d1").weights.channel
    assert load("rollout.verify.every_steps=null").verify.every_steps is None


def test_servers_that_weights_are_broadcast_to_need_no_folder(tmp_path):
    (tmp_path / "file").write_text("")  # below a file no folder can be made
    keys = (f"run.root={tmp_path / 'file'}", "rollout.backend=vllm:d1")
    check_weights_folder(config(*keys, "rollout.weights.channel=collective"))
    with pytest.raises(ConfigError, match="cannot hold the weights for the servers"):
        check_weights_folder(config(*keys))
