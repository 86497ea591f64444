"""What a caller gets from a sandbox, the same from every back end."""

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tandem.api.failures import WaitTimeout
from tandem.api.sandbox import Limits, Outcome, Program, Snapshot
from tandem.config.errors import ConfigError
from tandem.sandbox.choose import choose_sandbox

ENDS = {
    "ok": (Program(source="print(input())", stdin=b"hello\n"), Limits(), 0, b"hello\n"),
    "exit code": (Program(source="import sys\nprint(1)\nsys.exit(7)"), Limits(), 7, b"1\n"),
    "exception": (Program(source="print(1)\n1 / 0"), Limits(), 1, b"1\n"),
    "syntax error": (Program(source="print("), Limits(), 1, b""),
    "signal": (Program(source="import os\nos.kill(os.getpid(), 9)"), Limits(), -9, b""),
    "wall time": (Program(source="import time\nprint(1, flush=True)\ntime.sleep(60)"), Limits(wall_s=0.5), -9, b"1\n"),
    "CPU time": (Program(source="while True: pass"), Limits(cpu_s=0.5), -9, b""),
    "memory": (Program(source="x = bytearray(1 << 40)"), Limits(), 1, b""),
    "output": (Program(source="print('x' * 1000)"), Limits(output_bytes=10), None, b"x" * 10),
    "errors": (Program(source="import sys\nsys.stderr.write('x' * 1000)"), Limits(output_bytes=10), None, b""),
    "refused": (Program(argv=("no-such-program",)), Limits(), None, b""),
    "command": (Program(argv=("sh", "-c", "cat a/b; cat"), files={"a/b": b"1\n"}, stdin=b"2\n"), Limits(), 0, b"1\n2\n"),
}
STATUSES = {
    "ok": "ok",
    "exit code": "exit",
    "exception": "exit",
    "syntax error": "exit",
    "signal": "signal",
    "wall time": "timeout",
    "CPU time": "timeout",
    "memory": "memory",
    "output": "output",
    "errors": "output",
    "refused": "refused",
    "command": "ok",
}


@pytest.mark.parametrize("name", ENDS)
def test_the_outcome_says_how_a_program_ended(sandbox, name):
    program, limits, code, stdout = ENDS[name]
    outcome = asyncio.run(sandbox.run(program, limits))
    assert outcome.status == STATUSES[name], outcome
    assert outcome.stdout == stdout
    assert outcome.exit_code == code or outcome.status == "output"


CHILDREN = "import os, time\nfor _ in range(40):\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(60)"


def test_the_outcome_names_the_limit_of_processes_and_of_files(sandbox):
    many = asyncio.run(sandbox.run(Program(source=CHILDREN), Limits(wall_s=30, processes=8)))
    large = asyncio.run(sandbox.run(Program(argv=("dd", "if=/dev/zero", "of=f", "bs=1M", "count=4")), Limits(file_mib=2)))
    refused = b"BlockingIOError" in many.stderr  # by the kernel, where it counts the processes of this user
    assert (many.status, many.exit_code) == (("exit", 1) if refused else ("processes", -9)), many
    assert (large.status, large.exit_code) == ("files", -signal.SIGXFSZ), large


def test_a_traceback_shows_the_program_and_nothing_of_the_sandbox(sandbox):
    outcome = asyncio.run(sandbox.run(Program(source="def f():\n    return 1 / 0\nf()")))
    text = outcome.stderr.decode()
    assert "ZeroDivisionError" in text and "return 1 / 0" in text and "tandem" not in text


def test_a_program_runs_as_the_main_program_of_python_would(sandbox):
    source = """
import __main__, atexit, sys, threading
atexit.register(print, "exit handler")
threading.Thread(target=lambda: print("thread")).start()
class Point: pass
import pickle
print(__name__, __main__.Point is Point, type(pickle.loads(pickle.dumps(Point()))).__name__, sys.argv)
print([name for name in sys.modules if "tandem" in name])
print("no newline", end="")
"""
    outcome = asyncio.run(sandbox.run(Program(source=source)))
    lines = outcome.stdout.decode().splitlines()
    assert outcome.status == "ok"
    assert sorted(lines) == sorted(["thread", "__main__ True Point ['program.py']", "[]", "no newlineexit handler"])


ORDINARY = {
    "exit": ("print(1)\nexit()\nprint(2)", "1"),
    "quit with a code": ("quit(0)", ""),
    "asyncio": ("import asyncio\nasync def f(): await asyncio.sleep(0); return 3\nprint(asyncio.run(f()))", "3"),
    "subprocess": ("import subprocess\nprint(subprocess.run(['echo', 'x'], capture_output=True, text=True).stdout)", "x"),
    "python": (
        "import subprocess\nprint(subprocess.run(['python3', '-c', 'print(5)'], capture_output=True, text=True).stdout)",
        "5",
    ),
    "signals": ("import signal\nprint(signal.getsignal(signal.SIGCHLD) == 0, signal.set_wakeup_fd(-1))", "True -1"),
    "temporary files": ("import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x'); print(f.tell())", "1"),
    "threads": ("from concurrent.futures import ThreadPoolExecutor as T\nprint(sum(T(4).map(abs, range(-5, 5))))", "25"),
    "own modules": ("open('mine.py', 'w').write('x = 7')\nimport mine\nprint(mine.x)", "7"),
    "sqlite": ("import sqlite3\nprint(sqlite3.connect('a.db').execute('select 6').fetchone()[0])", "6"),
    "random": ("import random\nprint(0 <= random.random() < 1)", "True"),
    "unicode": ("print('é€')\nopen('ü', 'w').close()\nimport os\nprint(os.listdir('.'))", "é€\n['ü']"),
    "reading all input": ("import sys\nprint(len(sys.stdin.read()), sys.stdin.buffer.read())", "0 b''"),
    "deep recursion": ("import sys\nsys.setrecursionlimit(20000)\ndef f(n): return n and f(n - 1)\nprint(f(15000))", "0"),
    "large memory": ("print(len(bytearray(300 << 20)))", str(300 << 20)),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_work(sandbox, name):
    source, expected = ORDINARY[name]
    outcome = asyncio.run(sandbox.run(Program(source=source), Limits(wall_s=30)))
    assert (outcome.status, outcome.stdout.decode().strip()) == ("ok", expected), outcome.stderr.decode()


def test_processes_share_work_where_there_is_shared_memory(sandbox):
    if sandbox.name == "landlock":
        return  # no /dev/shm there
    source = "import multiprocessing as m\nprint(sum(m.Pool(2).map(abs, range(-5, 5))))"
    outcome = asyncio.run(sandbox.run(Program(source=source), Limits(wall_s=30)))
    assert (outcome.status, outcome.stdout) == ("ok", b"25\n"), outcome.stderr.decode()


def test_a_pipeline_of_a_shell_ends_when_its_reader_does(sandbox):
    outcome = asyncio.run(sandbox.run(Program(argv=("sh", "-c", "yes | head -n 1")), Limits(wall_s=30)))
    assert (outcome.status, outcome.stdout, outcome.stderr) == ("ok", b"y\n", b"")


def test_two_programs_draw_different_random_numbers(sandbox):
    program = Program(source="import random, uuid, tempfile\nprint(random.random(), uuid.uuid4())")
    outputs = {asyncio.run(sandbox.run(program)).stdout for _ in range(3)}
    assert len(outputs) == 3


LEAVE = """
import builtins, json, os, random, sys, tempfile
builtins.print = None
json.loads = lambda *_: "forged"
random.seed(1)
sys.path.insert(0, "/nowhere")
os.environ["LEFT"] = "1"
secret = "left-" + "behind" * 3
open("left", "w").write(secret)
open(os.path.join(tempfile.gettempdir(), "left"), "w").write(secret)
"""
LOOK = """
import gc, json, os, sys, tempfile
print(json.loads("[1]"), "LEFT" in os.environ, "/nowhere" in sys.path, os.listdir("."))
print(os.path.exists(os.path.join(tempfile.gettempdir(), "left")))
print(sum("left-" + "behind" * 3 in each for each in gc.get_objects() if isinstance(each, dict)))
"""


def test_a_program_finds_nothing_of_the_one_before_it(sandbox):
    asyncio.run(sandbox.run(Program(source=LEAVE)))
    assert asyncio.run(sandbox.run(Program(source=LOOK))).stdout == b"[1] False False []\nFalse\n0\n"


def test_the_content_of_a_program_never_lies_in_memory_that_the_next_one_inherits(sandbox):
    if sandbox.name == "landlock":
        return  # a program cannot read its own memory there: it has no /proc
    word = b"only-in-the-first-" + os.urandom(4).hex().encode()
    first = Program(source=f"x = {word.decode()!r}", files={"f": word * 100}, stdin=word * 100)
    scan = """
found = unreadable = 0
for line in open("/proc/self/maps"):
    where, rights, *_, name = (line.split() + [""])[:7] if len(line.split()) > 5 else (*line.split(), "")
    if "r" in rights and name not in ("[vvar]", "[vsyscall]", "[vvar_vclock]"):
        start, end = (int(x, 16) for x in where.split("-"))
        with open("/proc/self/mem", "rb") as memory:
            memory.seek(start)
            try:
                found += memory.read(end - start)[::-1].count(needle)  # backwards, or it would find itself
            except OSError:
                unreadable += 1
print(found, unreadable < 5)
"""
    asyncio.run(sandbox.run(first))
    second = asyncio.run(sandbox.run(Program(source=f"needle = {word[::-1]!r}\n{scan}")))
    assert (second.status, second.stdout) == ("ok", b"0 True\n"), second.stderr


def test_the_same_program_prints_the_same_on_every_worker():
    try:
        sandbox = choose_sandbox("auto", size=2)
    except ConfigError as error:
        pytest.skip(str(error))

    async def run():
        return await asyncio.gather(*[sandbox.run(Program(source="print({f'{i}' for i in range(99)})")) for _ in range(4)])

    outputs = {outcome.stdout for outcome in asyncio.run(run())}
    sandbox.close()
    assert len(outputs) == 1


def test_a_program_can_be_spoken_to(sandbox):
    source = (
        "import sys\nfor line in sys.stdin:\n    print(line.upper(), end='', flush=True)\n    print('seen', file=sys.stderr)"
    )

    async def talk():
        process = await sandbox.start(Program(source=source, stdin=b"first\n"))
        answers = [await process.receive(100, 20)]
        await process.send(b"second\n", 20)
        answers.append(await process.receive(3, 20))
        answers.append(await process.receive(100, 20))
        with pytest.raises(WaitTimeout, match=r"wrote nothing within 0\.1 s"):
            await process.receive(100, 0.1)
        return answers, await process.close(), await process.close()

    answers, outcome, again = asyncio.run(talk())
    assert answers == [b"FIRST\n", b"SEC", b"OND\n"]
    assert outcome == again and outcome.status == "timeout" and outcome.stderr == b"seen\nseen\n"


def test_a_program_that_does_not_read_or_has_ended_is_noticed_while_speaking(sandbox):
    async def talk():
        deaf = await sandbox.start(Program(source="import time; time.sleep(60)"))
        with pytest.raises(WaitTimeout, match="did not read"):
            await deaf.send(bytes(1 << 20), 0.3)
        await deaf.close()
        ended = await sandbox.start(Program(source="print('bye')\nraise SystemExit(3)"))
        words = [await ended.receive(100, 20), await ended.receive(100, 20)]
        return words, await ended.close()

    words, outcome = asyncio.run(talk())
    assert words == [b"bye\n", b""] and (outcome.status, outcome.exit_code) == ("exit", 3)


def test_listening_to_a_program_that_closed_its_errors_costs_nothing(sandbox):
    async def listen():
        process = await sandbox.start(Program(source="import os, time\nos.close(2)\nprint(1, flush=True)\ntime.sleep(60)"))
        assert await process.receive(100, 20) == b"1\n"
        began = time.thread_time()
        with pytest.raises(WaitTimeout):
            await process.receive(100, 0.5)
        seconds = time.thread_time() - began
        await process.close()
        return seconds

    assert asyncio.run(listen()) < 0.05


def test_a_workspace_keeps_its_files_between_programs_and_no_process(sandbox):
    async def work():
        space = await sandbox.open({"in/a.txt": b"1"}, Limits(wall_s=50))
        first = await space.exec(Program(argv=("sh", "-c", "cp in/a.txt b.txt; (sleep 60 &) ; mkdir made")))
        second = await space.exec(Program(source="import os; print(sorted(os.listdir('.')))"))
        await space.write("deep/er.txt", b"2")
        with pytest.raises(OSError, match="No such file"):
            await space.read("missing")
        with pytest.raises(ConfigError, match="relative"):
            await space.read("../x")
        content = await space.read("deep/er.txt"), await space.read("b.txt")
        await space.close()
        return first, second, content

    first, second, content = asyncio.run(work())
    assert first.status == "ok" and first.seconds < 45
    assert second.stdout == b"['b.txt', 'in', 'made']\n"
    assert content == (b"2", b"1")


def test_a_snapshot_is_restored_into_the_same_workspace_and_into_another(sandbox):
    async def work():
        space = await sandbox.open({"a/b": b"1"})
        await space.exec(Program(argv=("ln", "-s", "/etc/shadow", "link")))
        snapshot = await space.snapshot()
        await space.exec(Program(argv=("sh", "-c", "rm -r a; echo 2 > c")))
        await space.restore(snapshot)
        other = await sandbox.open({"x": b"x"})
        await other.restore(Snapshot(snapshot.archive))
        listing = Program(source="import os; print(sorted(os.listdir('.')), open('a/b').read(), os.readlink('link'))")
        outcomes = await space.exec(listing), await other.exec(listing)
        await space.close()
        await other.close()
        return outcomes

    expected = b"['a', 'link'] 1 /etc/shadow\n"
    assert [outcome.stdout for outcome in asyncio.run(work())] == [expected, expected]


def test_reading_a_workspace_file_follows_a_link_no_further_than_programs_may(sandbox, tmp_path):
    if sandbox.name == "none":
        return  # there are no walls
    secret = tmp_path / "secret"
    secret.write_text("secret")

    async def work():
        space = await sandbox.open()
        await space.exec(Program(source=f"import os; os.symlink({str(secret)!r}, 'link'); os.mkfifo('pipe')"))
        for path in ("link", "pipe"):
            with pytest.raises(OSError, match="in a sandbox failed"):
                await space.read(path)
        await space.close()

    asyncio.run(work())


def test_a_cancelled_call_ends_its_program_and_the_worker_serves_the_next(sandbox):
    async def work():
        task = asyncio.create_task(sandbox.run(Program(source="import time; time.sleep(60)"), Limits(wall_s=60)))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await sandbox.run(Program(source="print(1)")), time.monotonic() - began

    outcome, seconds = asyncio.run(work())
    assert outcome.stdout == b"1\n" and seconds < 50


def test_descriptors_and_memory_of_the_parent_stay_flat(sandbox):
    async def many(count):
        outcomes = await asyncio.gather(*[sandbox.run(Program(source="print(1)")) for _ in range(count)])
        assert {outcome.status for outcome in outcomes} == {"ok"}

    asyncio.run(many(5))
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(many(40))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("wrong", [{"wall_s": 0}, {"memory_mib": -1}, {"processes": 0}])
def test_limits_must_be_positive(wrong):
    with pytest.raises(ConfigError, match=f"Limits.{next(iter(wrong))} must be positive"):
        Limits(**wrong)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a\0b"])
def test_a_file_of_a_program_must_stay_below_its_folder(path):
    with pytest.raises(ConfigError, match="relative and stay below"):
        Program(source="", files={path: b""})


def test_a_program_is_a_command_or_a_source():
    with pytest.raises(ConfigError, match="either argv or source"):
        Program()
    with pytest.raises(ConfigError, match="either argv or source"):
        Program(argv=("ls",), source="")
    assert Outcome("lost").exit_code is None


@pytest.mark.parametrize("name", ["bubblewrap", "landlock"])
def test_further_folders_can_be_read_and_not_written(name):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        _read_further_folders(name, Path(folder))


def _read_further_folders(name, place):
    real, link = place / "real", place / "link"
    real.mkdir()
    link.symlink_to(real)
    real.joinpath("tool").write_text("#!/bin/sh\necho tool; echo x > $0")
    real.joinpath("tool").chmod(0o755)
    place.chmod(0o755)
    place.joinpath("beside").write_text("secret")
    try:
        sandbox = choose_sandbox(name, size=1, readable=[str(link)])
    except ConfigError as error:
        pytest.skip(f"{name} does not work here: {str(error).splitlines()[1]}")
    programs = [Program(argv=("sh", "-c", f"{path}/tool; cat {place}/beside")) for path in (link, real)]
    outcomes = [asyncio.run(sandbox.run(program)) for program in programs]
    sandbox.close()
    assert [(outcome.stdout, outcome.stderr.count(b"\n")) for outcome in outcomes] == [(b"tool\n", 2)] * 2, outcomes


@pytest.mark.parametrize("wrong", ["opt", "/no/such/folder", "/tmp", "/"])
def test_a_further_folder_must_be_there(wrong):
    with pytest.raises(ConfigError, match=r"each with its whole path|of their own"):
        choose_sandbox(readable=[wrong])
