"""Servers that outlive the ranks that started them; ranks and servers are processes of a few lines of Python."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tandem.engines.inference.remote.launch import ServerPlace, take_over
from tandem.launch import local
from tandem.launch.local import run_ranks
from tests.zygote import gone

RANK = """
import os, pathlib, signal, sys, time
from tandem.engines.inference.remote.launch import Keeping, keep, take_over
from tandem.workers.process import Child
from tandem.launch.rank import follow_launcher, kept_servers, restarts

here, again, settings = pathlib.Path({folder!r}), restarts(), "same"


def server():
    place = Keeping(*kept_servers()).place("tiny-0")
    found = take_over(place, settings, lambda facts, process: process)
    if found is None:
        words = [sys.executable, "-c", "import time; time.sleep(600)"]
        found = Child.start(words, log_file=here / "log", grace_s=0.3, keep=(place.pipe, place.file))
        (here / f"starting-{{again}}").write_text(str(found.pid))
        before_it_is_kept()
        keep(place, found, settings, {{}})
    (here / f"server-{{again}}").write_text(str(found.pid))
    return found


def before_it_is_kept():
    pass


def die():
    os.kill(os.getpid(), signal.SIGKILL)


follow_launcher()
"""

LAUNCHER = """
import sys
from tandem.engines.inference.remote.launch import ServerPlace, take_over
from tandem.launch import local
patience = local.Patience(restart_s=float(sys.argv[1]))
sys.exit(local.run_ranks([sys.executable, "-c", sys.argv[2]], 1, max_restarts=1, patience=patience))
"""


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def said(tmp_path, monkeypatch):
    """What the ranks wrote: a server's process number, by the file's name. Folders of launchers are in `launchers`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    yield lambda name: int((tmp_path / name).read_text())
    assert not list((tmp_path / "temporary").glob("tandem-servers-*"))
    for file in (*tmp_path.glob("starting-*"), *tmp_path.glob("server-*")):
        assert gone(int(file.read_text())), file.name


def script(tmp_path, lines):
    return RANK.format(folder=str(tmp_path)) + lines


def ranks(tmp_path, lines, max_restarts=1):
    patience = local.Patience(fail_s=0.2, restart_s=0.0)
    return run_ranks([sys.executable, "-c", script(tmp_path, lines)], 1, max_restarts=max_restarts, patience=patience)


def test_a_server_is_taken_over_by_its_restarted_rank_and_ends_with_the_run(said, tmp_path):
    lines = "process = server()\nif again < 2: die()\nassert process.taken_over and process.kept and process.alive"
    assert ranks(tmp_path, lines, max_restarts=2) == 0
    assert said("server-0") == said("server-1") == said("server-2") and not (tmp_path / "starting-1").exists()


@pytest.mark.parametrize("what", ["its file", "the folder"])
def test_one_whose_record_a_cleaner_removes_is_taken_over_all_the_same(said, tmp_path, what):
    lines = f"""
import shutil
process, (folder, _) = server(), kept_servers()
(file,) = folder.iterdir()
if not again:
    before = file.read_bytes()
    file.unlink() if {what!r} == "its file" else shutil.rmtree(folder)
    assert not file.exists()
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline: time.sleep(0.02)
    assert file.read_bytes() == before and [path.name for path in folder.iterdir()] == [file.name]
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    die()
assert process.taken_over
"""
    assert ranks(tmp_path, lines) == 0
    assert said("server-0") == said("server-1") and not (tmp_path / "starting-1").exists()


def test_a_record_is_not_written_again_where_others_may_look(said, tmp_path):
    lines = """
server()
folder = kept_servers()[0]
folder.chmod(0o755)
(file,) = folder.iterdir()
file.unlink()
time.sleep(0.5)
assert list(folder.iterdir()) == []
folder.chmod(0o700)
while not file.exists(): time.sleep(0.02)
"""
    assert ranks(tmp_path, lines) == 0


def test_it_ends_with_a_run_that_is_not_started_again_any_more(said, tmp_path):
    assert ranks(tmp_path, "server()\ndie()") == 1
    assert said("server-0") == said("server-1")


def test_it_ends_with_a_run_that_would_fail_again(said, tmp_path):
    assert ranks(tmp_path, f"server()\nsys.exit({local.EXIT_CONFIG})") == 2
    assert said("server-0")


def test_one_that_is_killed_together_with_its_rank_is_started_anew(said, tmp_path):
    assert ranks(tmp_path, "process = server()\nif not again: os.kill(process.pid, signal.SIGKILL); die()") == 0
    assert said("server-0") != said("server-1") == said("starting-1")


def test_one_that_was_not_ready_is_gone_before_the_ranks_are_started_again(said, tmp_path):
    lines = f"""
if again:
    assert not os.path.exists(f"/proc/{{int(open({str(tmp_path / "starting-0")!r}).read())}}/exe")
else:
    before_it_is_kept = die
server()
"""
    assert ranks(tmp_path, lines) == 0
    assert said("starting-0") != said("server-1") == said("starting-1")


def test_one_that_was_started_with_other_words_is_ended_and_a_new_one_started(said, tmp_path):
    lines = """
settings = f"those of {again}"
server()
if not again: die()
assert not os.path.exists(f"/proc/{int((here / 'server-0').read_text())}/exe")
"""
    assert ranks(tmp_path, lines) == 0
    assert said("server-0") != said("server-1")


def test_one_that_does_not_answer_is_ended_and_a_new_one_started(said, tmp_path, capfd):
    lines = """
def refuse(facts, process):
    from tandem.api.failures import ServerFailed
    raise ServerFailed("it says nothing")


def take_over(place, settings, attach, original=take_over):
    return original(place, settings, refuse)


server()
if not again: die()
"""
    assert ranks(tmp_path, lines) == 0
    assert said("server-0") != said("server-1")
    assert f"tiny-0 (process {said('server-0')}) is not taken over but started anew: " in capfd.readouterr().err


def test_one_that_hangs_does_not_hold_the_ranks_up(said, tmp_path, capfd):
    lines = """
from tandem.engines.inference.remote import launch
launch.TAKE_OVER_S = 0.5


def take_over(place, settings, attach, original=take_over):
    return original(place, settings, lambda facts, process: time.sleep(600))


server()
if not again: die()
"""
    began = time.monotonic()
    assert ranks(tmp_path, lines) == 0
    assert time.monotonic() - began < 60 and said("server-0") != said("server-1")
    assert "it could not be taken over within 0.5 s" in capfd.readouterr().err


def test_one_whose_word_cannot_be_written_is_not_kept(said, tmp_path, capfd):
    lines = "def before_it_is_kept():\n    Keeping(*kept_servers()).place('tiny-0').file.with_suffix('.partial').mkdir()\n"
    lines += "if again: before_it_is_kept = lambda: None\nserver()\nif not again: die()"
    assert ranks(tmp_path, lines) == 0
    assert said("server-0") != said("server-1") and "tiny-0 is not kept" in capfd.readouterr().err


def test_what_others_may_look_into_holds_no_tokens(said, tmp_path, capfd):
    lines = "folder = kept_servers()[0]\nfolder.mkdir()\nfolder.chmod(0o755)\nserver()"
    assert ranks(tmp_path, lines) == 1
    assert "must be a folder of this user's alone" in capfd.readouterr().err and not list(tmp_path.glob("starting-*"))


def test_servers_of_a_run_are_not_for_ranks_below_its_ranks(said, tmp_path):
    inner = "from tandem.launch.rank import follow_launcher, kept_servers; follow_launcher(); assert kept_servers() is None"
    lines = f"from tandem.launch.local import run_ranks\nsys.exit(run_ranks([sys.executable, '-c', {inner!r}], 1))"
    assert ranks(tmp_path, lines) == 0


def test_whoever_took_it_over_can_end_it(said, tmp_path):
    lines = "process = server()\nif not again: die()\nprocess.close()\nprocess.close()\n"
    lines += "assert not process.alive and process.how_it_ended() == f'its process {process.pid} ended'\n"
    lines += "again = 'second'\nassert not server().taken_over"
    assert ranks(tmp_path, lines) == 0
    assert said("server-0") == said("server-1") != said("server-second")


def test_what_the_rank_forked_does_not_keep_it(said, tmp_path):
    lines = """
pid = os.fork()
if not pid: time.sleep(30); os._exit(0)
(here / "forked").write_text(str(pid))
server()
time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, "0", script(tmp_path, lines)])
    until((tmp_path / "server-0").exists)
    rank = psutil.Process(launcher.pid).children()[0]
    launcher.kill()
    rank.kill()
    try:
        launcher.wait()
        until(lambda: gone(said("server-0")), 5)
        assert not gone(said("forked"))
    finally:
        os.kill(said("forked"), signal.SIGKILL)


@pytest.mark.parametrize("when", ["between two groups", "while the ranks work"])
def test_it_is_gone_soon_after_its_launcher_was_killed(said, tmp_path, when):
    lines = "server()\nif here.joinpath('die').exists(): die()\ntime.sleep(600)"
    (tmp_path / "die").touch() if when == "between two groups" else None
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, "600", script(tmp_path, lines)], stderr=subprocess.PIPE)
    with launcher.stderr as words:
        until((tmp_path / "server-0").exists)
        if when == "between two groups":
            while b"starting again" not in words.readline():
                pass
            assert not psutil.Process(launcher.pid).children()
        (folder,) = (tmp_path / "temporary").glob("tandem-servers-*")
        (file,) = folder.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600
        assert json.loads(file.read_text())["pid"] == said("server-0") and not gone(said("server-0"))
        launcher.kill()
        launcher.wait()
    until(lambda: gone(said("server-0")) and not folder.exists(), 5)


def test_it_is_gone_when_its_launcher_was_asked_to_end_between_two_groups(said, tmp_path):
    words = [sys.executable, "-c", LAUNCHER, "600", script(tmp_path, "server()\ndie()")]
    launcher = subprocess.Popen(words, stderr=subprocess.PIPE)
    with launcher.stderr as lines:
        while b"starting again" not in lines.readline():
            pass
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == local.EXIT_INTERRUPTED
    assert gone(said("server-0"))


def test_without_restarts_a_rank_keeps_nothing(tmp_path):
    lines = "assert kept_servers() is None"
    assert run_ranks([sys.executable, "-c", script(tmp_path, lines)], 1) == 0
    assert "TANDEM_KEPT" not in os.environ and Path(tempfile.gettempdir()).is_dir()


@pytest.mark.parametrize("words", ["[]", '{"keeper": null, "pid": 1, "log_file": "x"}', "{", '{"pid": 1}'])
def test_a_record_that_is_none_is_named_and_a_server_started_anew(tmp_path, caplog, words):
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    (folder / "tiny-0.json").write_text(words)

    assert take_over(ServerPlace("tiny-0", folder / "tiny-0.json", 0), "same", lambda facts, process: process) is None
    assert "tiny-0 is started anew: the file of the kept server cannot be read" in caplog.text


def test_a_record_in_a_folder_that_others_can_write_to_is_not_believed(tmp_path, caplog):
    folder = tmp_path / "kept"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "tiny-0.json").write_text(json.dumps({"keeper": os.getpid(), "pid": os.getpid(), "log_file": "x"}))

    assert take_over(ServerPlace("tiny-0", folder / "tiny-0.json", 0), "same", lambda facts, process: process) is None
    assert "not a folder of this user alone" in caplog.text
