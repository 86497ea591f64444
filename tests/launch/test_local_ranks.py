"""Ranks that a command starts on this machine: they live and end together."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.launch.local import Patience, run_ranks
from tests.zygote import gone

QUICK = 60.0
"""Seconds within which a group must have ended; each wait inside is far shorter."""


def ranks(code: str, count: int = 2, **patience: float) -> int:
    """Runs a few lines on each rank."""
    return run_ranks([sys.executable, "-c", code], count, patience=Patience(**patience))


def wait_for(what, seconds: float = QUICK) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_each_rank_knows_its_place_and_all_meet_in_one_file(tmp_path):
    code = f"""
import os
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE TANDEM_RENDEZVOUS".split()
open({str(tmp_path)!r} + "/" + os.environ["RANK"], "w").write(" ".join(os.environ[n] for n in names))
"""
    assert ranks(code, 3) == 0
    said = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [words[:4] for words in said] == [[str(rank), str(rank), "3", "3"] for rank in range(3)]
    assert len({words[4] for words in said}) == 1
    assert not Path(said[0][4]).parent.exists()


def test_a_rank_that_fails_ends_the_others_and_is_quoted(tmp_path, capfd):
    code = f"""
import os, sys, time
open({str(tmp_path)!r} + "/" + os.environ["RANK"], "w").write(str(os.getpid()))
if os.environ["RANK"] == "1":
    sys.exit("the third gradient is missing")
time.sleep(600)
"""
    began = time.monotonic()
    assert ranks(code, fail_s=0.5) == 1
    assert time.monotonic() - began < QUICK
    said = capfd.readouterr().err
    assert "rank 1 of 2 ended with exit status 1" in said and "rank 1 | the third gradient is missing" in said
    assert gone(int((tmp_path / "0").read_text()))


def test_a_rank_that_ends_without_an_error_is_told_with_its_phase_and_step(capfd):
    code = """
import os, time
os.write(int(os.environ["TANDEM_TELL"]), b'{"count": 7, "phase": "generate", "step": 3}\\n')
time.sleep(1)
os._exit(4)
"""
    assert ranks(code, 1) == 4
    said = (
        "rank 0 of 1 ended with exit status 4 and raised no error, last heard of in phase 'generate' of step 3, "
        "and all other ranks with"
    )
    assert said in capfd.readouterr().err


def test_a_killed_rank_ends_the_others_also_one_that_ignores_a_polite_request(tmp_path, capfd):
    code = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    assert ranks(code, fail_s=0.2, term_s=0.5) == 1
    said = capfd.readouterr().err
    assert "rank 1 of 2 ended by signal SIGKILL" in said and "actor.max_tokens_per_micro_batch" in said


def test_the_rank_that_broke_is_quoted_also_where_another_one_ended_before_it(capfd):
    code = """
import os, sys, time
if os.environ["RANK"] == "0":
    sys.exit("connection closed by peer")
time.sleep(0.5)
sys.exit("the third gradient is missing")
"""
    assert ranks(code, fail_s=2.0) == 1
    assert "rank 1 | the third gradient is missing" in capfd.readouterr().err


def test_what_one_rank_alone_refuses_is_quoted(capfd):
    code = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("error: no GPU for rank 1", file=sys.stderr)
    sys.exit(2)
time.sleep(600)
"""
    assert ranks(code, fail_s=0.2) == 2
    assert "rank 1 | error: no GPU for rank 1" in capfd.readouterr().err


def test_what_all_ranks_refuse_is_said_once(capfd):
    assert ranks("import sys; print('error: no such model', file=sys.stderr); sys.exit(2)") == 2
    assert capfd.readouterr().err == "error: no such model\n"


STARTER = """
import sys
from tandem.launch.local import run_ranks
sys.exit(run_ranks([sys.executable, "-c", sys.argv[1]], 2))
"""

RANK = """
import os, signal, sys, time
def close(*_):
    open({folder!r} + "/closed-" + os.environ["RANK"], "w").close()
    sys.exit(130)
signal.signal(signal.SIGINT, close)
signal.signal(signal.SIGTERM, close)
{more}
partial = {folder!r} + "/.partial-" + os.environ["RANK"]
open(partial, "w").write(str(os.getpid()))
os.rename(partial, {folder!r} + "/rank-" + os.environ["RANK"])
time.sleep(600)
"""


def started(folder: Path, more: str = "") -> tuple[subprocess.Popen, list[int]]:
    """A process with two ranks that say when they are interrupted; it, and their numbers."""
    code = RANK.format(folder=str(folder), more=more)
    with (folder / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, "-c", STARTER, code], stderr=said)
    files = [folder / f"rank-{rank}" for rank in range(2)]
    wait_for(lambda: all(file.exists() for file in files))
    return process, [int(file.read_text()) for file in files]


def test_ctrl_c_reaches_every_rank_once(tmp_path):
    process, pids = started(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(QUICK) == 130
    assert (tmp_path / "closed-0").exists() and (tmp_path / "closed-1").exists()
    assert all(gone(pid) for pid in pids)
    assert (tmp_path / "said").read_text() == ""


def test_a_request_that_comes_twice_reaches_ranks_once_also_if_they_ignore_ctrl_c(tmp_path):
    more = f"""
signal.signal(signal.SIGINT, signal.SIG_IGN)
def close_slowly(*_):
    open({str(tmp_path)!r} + "/asked-" + os.environ["RANK"], "a").write("x")
    time.sleep(0.5)
    close()
signal.signal(signal.SIGTERM, close_slowly)
"""
    process, pids = started(tmp_path, more)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(QUICK) == 130
    assert all((tmp_path / f"asked-{rank}").read_text() == "x" and (tmp_path / f"closed-{rank}").exists() for rank in (0, 1))
    assert all(gone(pid) for pid in pids)


def test_a_rank_that_fails_while_it_closes_has_failed(tmp_path):
    process, _ = started(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))")
    process.send_signal(signal.SIGINT)
    assert process.wait(QUICK) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_end_when_whoever_started_them_is_killed(tmp_path):
    process, pids = started(tmp_path, "from tandem.launch.rank import follow_launcher; follow_launcher()")
    process.kill()
    process.wait(QUICK)
    wait_for(lambda: all(gone(pid) for pid in pids))
    assert (tmp_path / "closed-0").exists() and (tmp_path / "closed-1").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and only Linux tells of a parent's death")
def test_a_rank_that_is_stopped_ends_too_when_whoever_started_it_is_killed(tmp_path):
    process, pids = started(tmp_path, "from tandem.launch.rank import follow_launcher; follow_launcher()")
    os.kill(pids[1], signal.SIGSTOP)
    wait_for(lambda: Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    process.kill()
    process.wait(QUICK)
    wait_for(lambda: all(gone(pid) for pid in pids))
    assert (tmp_path / "closed-1").exists()


def test_without_a_launcher_nobody_is_followed():
    code = """
import threading
from tandem.launch.rank import follow_launcher
follow_launcher()
print(threading.active_count())
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=QUICK)
    assert done.stdout == "1\n"


FAULT_AT_EXIT = """
import os, sys, threading
class Fault:
    def __del__(self, abort=os.abort):
        abort()
sys.fault = Fault()  # let go of while the interpreter is taken apart
sys.mine = open(os.environ["MINE"] + os.environ.get("RANK", ""), "w")
sys.mine.write("a line")
threading.Thread(target=lambda: (threading.main_thread().join(), print("closed"))).start()
"""


def test_a_rank_that_went_well_is_not_lost_to_a_fault_in_a_dying_interpreter(tmp_path, capfd, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(FAULT_AT_EXIT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MINE", str(tmp_path / "mine"))
    command = [sys.executable, "-P", "-m", "tandem", "algorithms"]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=QUICK)
    assert alone.returncode == -signal.SIGABRT and alone.stdout.endswith("closed\n")
    assert run_ranks(command, 2) == 0
    assert capfd.readouterr().out == alone.stdout
    assert {(tmp_path / f"mine{rank}").read_text() for rank in range(2)} == {"a line"}
    assert run_ranks([*command[:-1], "no-such-command"], 2) == 2


def test_ranks_without_a_network_between_them_are_refused_before_they_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    keys = [f"run.root={tmp_path}", "train_dataset.path=addition", "actor.backend=fsdp:d2"]

    assert main(["sft", *keys]) == 2
    assert "interface nowhere0, which has no address here (there are: lo" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
