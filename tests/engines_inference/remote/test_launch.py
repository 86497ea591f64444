"""Servers as child processes: they start, say why they do not, and leave nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tandem.api.failures import EngineDied, ServerFailed, WaitTimeout
from tandem.config.errors import ConfigError
from tandem.engines.inference.remote.launch import ServerProcess, free_port, wait_ready
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
from tandem.engines.inference.remote.launch import ServerProcess
server = ServerProcess.start(sys.argv[1:4], log_file=pathlib.Path(sys.argv[4]), grace_s=0.3)
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
    server = ServerProcess.start(command, log_file=tmp_path / "logs/server.log", grace_s=0.3)
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
    server = ServerProcess.start(words, log_file=tmp_path / "log")

    def ask():
        raise ServerFailed("refused")

    with pytest.raises(EngineDied, match=r"(?s)exit status 3.*no such model"):
        wait_ready(server, ask, what="the server", timeout_s=20, progress=print)
    server.close()


def test_a_server_that_is_killed_says_by_what(tmp_path):
    server = ServerProcess.start([sys.executable, "-c", "import time; time.sleep(60)"], log_file=tmp_path / "log")
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.alive)
    assert "killed by SIGKILL" in server.how_it_ended()
    server.close()


def test_waiting_for_a_server_has_a_deadline_and_words_of_progress(tmp_path):
    words = ["/bin/sh", "-c", "echo 'loading weights'; exec sleep 60"]  # says it before two seconds are over
    server = ServerProcess.start(words, log_file=tmp_path / "log")
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
    server = ServerProcess.start(
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


def test_a_missing_interpreter_is_a_matter_of_configuration(tmp_path):
    with pytest.raises(ConfigError, match="interpreter"):
        ServerProcess.start([str(tmp_path / "python"), "-m", "server"], log_file=tmp_path / "log")


def test_a_free_port_is_free():
    with socket.socket() as one:
        one.bind(("127.0.0.1", free_port()))
