"""Servers as child processes: they start, say why they do not, and leave nothing behind."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

from tandem.api.failures import EngineDied, ServerFailed, WaitTimeout
from tandem.config.errors import ConfigError
from tandem.engines.inference.remote.launch import free_port, wait_ready
from tandem.workers.process import Child
from tests.zygote import gone

FAMILY = """
import subprocess, sys, time, pathlib
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"],
                         start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
print("ready", flush=True)
time.sleep(60)
"""

OWNER = """
import sys, time, pathlib
from tandem.workers.process import Child
server = Child.start(sys.argv[1:4], log_file=pathlib.Path(sys.argv[4]), grace_s=0.3)
print(server.pid, flush=True)
time.sleep(60)
"""


def until(condition, timeout_s=15.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def family(tmp_path):
    """The words that start a server with a stubborn grandchild in another session, and where its number will be."""
    script = tmp_path / "server.py"
    script.write_text(FAMILY)
    return [sys.executable, str(script), str(tmp_path / "grandchild")], tmp_path / "grandchild"


def test_a_server_ends_with_all_its_descendants(family, tmp_path):
    command, file = family
    server = Child.start(command, log_file=tmp_path / "logs/server.log", grace_s=0.3)
    until(lambda: file.exists() and file.read_text())
    grandchild = int(file.read_text())
    assert server.alive and server.how_it_ended() is None and not gone(grandchild)
    until(lambda: server.last_words().endswith("ready"))
    server.close()
    server.close()
    assert gone(server.pid) and gone(grandchild) and not server.alive


def test_a_server_ends_when_its_owner_is_killed(family, tmp_path):
    command, file = family
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *command, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        pid = int(owner.stdout.readline())
        until(lambda: file.exists() and file.read_text())
        assert not gone(pid)
        os.kill(owner.pid, signal.SIGKILL)
        until(lambda: gone(pid) and gone(int(file.read_text())))
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


def test_a_server_that_ends_at_its_start_is_reported_with_its_last_words(tmp_path):
    words = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    server = Child.start(words, log_file=tmp_path / "log")

    def ask():
        raise ServerFailed("refused")

    with pytest.raises(EngineDied, match=r"(?s)exit status 3.*no such model"):
        wait_ready(server, ask, what="the server", timeout_s=20, progress=print)
    server.close()


def test_a_server_that_is_killed_says_by_what(tmp_path):
    server = Child.start([sys.executable, "-c", "import time; time.sleep(60)"], log_file=tmp_path / "log")
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.alive)
    assert "killed by SIGKILL" in server.how_it_ended()
    server.close()


@pytest.mark.parametrize("look", ["alive", "wait"])
def test_what_a_server_started_is_killed_when_its_killed_keeper_is_noticed(tmp_path, look):
    server = Child.start(["/bin/sh", "-c", "sleep 60 & echo $!; wait"], log_file=tmp_path / "log")
    until(lambda: server.last_words(1).isdecimal())
    keeper, started = server.processes()[0], int(server.last_words(1))
    os.kill(keeper.pid, signal.SIGKILL)
    until(lambda: gone(server.pid))  # the kernel kills what the keeper started itself
    assert not gone(started)
    if look == "wait":
        assert server.wait(5) == -signal.SIGKILL
    until(lambda: not server.alive and gone(started))
    server.close()


def test_waiting_for_a_server_has_a_deadline_and_words_of_progress(tmp_path):
    words = ["/bin/sh", "-c", "echo 'loading weights'; exec sleep 60"]  # says it before two seconds are over
    server = Child.start(words, log_file=tmp_path / "log")
    told = []

    def ask():
        raise ServerFailed("connection refused")

    with pytest.raises(WaitTimeout, match=r"(?s)within 2 s \(server: connection refused\).*loading weights"):
        wait_ready(server, ask, what="the server", timeout_s=2, progress=told.append, progress_s=0.3)
    assert any("loading weights" in words for words in told)
    assert wait_ready(server, lambda: "there", what="the server", timeout_s=2, progress=told.append) == "there"
    server.close()


def test_a_server_runs_on_the_cores_it_was_given(tmp_path):
    core = min(os.sched_getaffinity(0))
    server = Child.start(
        [
            sys.executable,
            "-c",
            "import os, time; print(os.sched_getaffinity(0), os.environ.get('PYTHONPATH')); time.sleep(60)",
        ],
        log_file=tmp_path / "log",
        cpus=(core,),
    )
    until(lambda: server.last_words(1).startswith("{"))
    assert server.last_words(1) == f"{{{core}}} None", "and without what is about our own interpreter"
    server.close()


def test_a_server_lives_where_its_owner_has_more_than_a_thousand_files_open(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("so many files cannot be opened here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    try:
        server = Child.start(
            [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], log_file=tmp_path / "l"
        )
        until(lambda: server.last_words().endswith("up"))
        time.sleep(0.2)
        assert server.alive, server.how_it_ended()
        server.close()
        assert server.how_it_ended() == f"its process {server.pid} was killed by SIGTERM"
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FORKING = """
import os, signal, sys, time, pathlib
from tandem.workers.process import Child
server = Child.start(sys.argv[1:4], log_file=pathlib.Path(sys.argv[4]), grace_s=0.3)
while not server.last_words().endswith("ready"):
    time.sleep(0.02)
fork = os.fork()
if not fork:
    time.sleep(60)
    os._exit(0)
began = time.monotonic()
server.close()
print(time.monotonic() - began, flush=True)
os.kill(fork, signal.SIGKILL)
os.waitpid(fork, 0)
"""


def test_a_server_is_ended_at_once_although_a_fork_of_its_owner_holds_the_pipe(family, tmp_path):
    command, file = family
    done = subprocess.run(
        [sys.executable, "-c", FORKING, *command, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    assert float(done.stdout) < 5.0
    assert gone(int(file.read_text()), 1.0), "also the grandchild, which is in another session"


def test_a_missing_interpreter_is_a_matter_of_configuration(tmp_path):
    with pytest.raises(ConfigError, match="interpreter"):
        Child.start([str(tmp_path / "python"), "-m", "server"], log_file=tmp_path / "log")


def test_a_free_port_is_free():
    with socket.socket() as one:
        one.bind(("127.0.0.1", free_port()))


USERS = {
    "LD_LIBRARY_PATH": "/opt/cuda/lib64",
    "PATH": "/opt/bin:/usr/bin:/bin",
    "HOME": "/home/somebody",
    "HF_HOME": "/data/hf",
    "HF_TOKEN": "hf_x",
    "HF_ENDPOINT": "http://mirror",
    "HUGGING_FACE_HUB_TOKEN": "hf_y",
    "TRANSFORMERS_CACHE": "/data/cache",
    "http_proxy": "http://proxy:1",
    "HTTPS_PROXY": "http://proxy:2",
    "NO_PROXY": "localhost",
    "SSL_CERT_FILE": "/etc/own.pem",
    "CUDA_VISIBLE_DEVICES": "4,5",
    "CUDA_HOME": "/opt/cuda",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NCCL_SOCKET_IFNAME": "eth1",
    "NCCL_IB_HCA": "mlx5",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_DEBUG": "WARN",
    "GLOO_SOCKET_IFNAME": "eth1",
    "UCX_NET_DEVICES": "mlx5_0:1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_HOME": "/data/torch",
    "TORCHINDUCTOR_CACHE_DIR": "/data/inductor",
    "TRITON_CACHE_DIR": "/data/triton",
    "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
    "SGLANG_ENABLE_X": "1",
    "TMPDIR": "/tmp",
    "LC_ALL": "C.UTF-8",
    "SLURM_JOB_ID": "7",
    "XDG_CACHE_HOME": "/data/cache",
}
"""What somebody may have set for his servers."""

TORCHRUN = {
    **{f"TORCHELASTIC_{name}": "1" for name in ("RESTART_COUNT", "MAX_RESTARTS", "RUN_ID", "ERROR_FILE")},
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    **{f"{whose}RANK": "0" for whose in ("", "LOCAL_", "GROUP_", "ROLE_")},
    **{f"{whose}WORLD_SIZE": "1" for whose in ("", "LOCAL_", "GROUP_", "ROLE_")},
    **{"ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    **{"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_ASYNC_ERROR_HANDLING": "1"},
}
"""What torchrun sets for the ranks of a run."""

PRINT = "import json, os; print(json.dumps(dict(os.environ)), flush=True)"
FORM = """
import datetime, sys, torch.distributed as dist
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=0, world_size=1, timeout=datetime.timedelta(seconds=5)
)
print("formed", flush=True)
"""
"""As SGLang does in each of its processes."""


def last_line(tmp_path, *words):
    server = Child.start([sys.executable, *words], log_file=tmp_path / "log")
    until(lambda: not server.alive, 60)
    server.close()
    return server.last_words(1)


def test_a_server_gets_what_the_user_has_set_and_nothing_of_torchruns(tmp_path, monkeypatch):
    for name, value in {**USERS, **TORCHRUN}.items():
        monkeypatch.setenv(name, value)
    found = json.loads(last_line(tmp_path, "-c", PRINT))
    assert {name: found.get(name) for name in USERS} == USERS
    assert not found.keys() & TORCHRUN.keys()


@pytest.mark.slow
def test_a_server_under_torchrun_forms_a_process_group_of_its_own(tmp_path, monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert last_line(tmp_path, "-c", FORM, str(free_port())) == "formed"
