"""Programs that try to slip past a limit of all processes together, and honest ones beside them that must not be ended."""

import asyncio
from dataclasses import replace

import pytest

from tandem.api.sandbox import Limits, Program
from tandem.config.errors import ConfigError
from tandem.sandbox.choose import choose_sandbox

PRELUDE = """
import ctypes, mmap, os, signal, socket, sys, threading, time
libc = ctypes.CDLL(None)
def spin(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds: pass
def fill(place):
    for _ in range(20): place.write(b"x" * (1 << 20))
def in_children(count, work):
    for _ in range(count):
        if os.fork() == 0:
            work()
            time.sleep(60)
    time.sleep(60)
def nameless():
    f = open("f", "w+b", buffering=0)
    os.unlink("f")
    fill(f)
    return f
"""
STRANGE_NAME = "libc.prctl(15, b'\\xff\\xfe) 9 (', 0, 0, 0)\n"

PAST_MEMORY = {
    "in processes whose name is no text": STRANGE_NAME + "x = in_children(6, lambda: bytearray(b'x') * (40 << 20))",
    "in several pieces that are shared": "in_children(4, lambda: fill(m := mmap.mmap(-1, 60 << 20)) or fill(m) or fill(m))",
    "behind a first thread that has ended": """
def work():
    threading.Thread(target=lambda: (time.sleep(0.3), bytearray(b"x") * (40 << 20), time.sleep(60))).start()
    libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)
in_children(4, work)
""",
    "in tables of pages": """
m = mmap.mmap(-1, 120 << 30, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
m.madvise(15)
for at in range(0, 120 << 30, 2 << 20): m[at]
time.sleep(60)
""",
}
PAST_CPU = {
    "in processes whose name is no text": STRANGE_NAME + "in_children(4, lambda: spin(0.4))",
    "in children that nobody waits for": """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        spin(0.3)
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
time.sleep(60)
""",
    "in processes that end between two looks": """
for _ in range(50):
    if os.fork() == 0:
        for _ in range(3):
            if os.fork() == 0: spin(0.005)
        os._exit(0)
    os.wait()
    time.sleep(0.02)
time.sleep(60)
""",
}
PAST_FILES = {
    "in folders that cannot be read": """
for path in "dark", "dark/er": os.mkdir(path, 0o300)
for i in "12": fill(open("dark/er/" + i, "wb"))
""",
    "as many files of a folder that cannot be read": """
os.mkdir("dark", 0o300)
for i in range(21000): os.close(os.open(f"dark/{i}", os.O_CREAT | os.O_WRONLY))
""",
    "behind a path that is longer than any may be": """
for _ in range(17):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
for i in "12": fill(open(i, "wb"))
""",
    "removed and open": "held = [nameless(), nameless()]",
    "removed and open in one thread only": """
def work():
    libc.close_range(900, 900, 2)
    held.extend([nameless(), nameless()])
    time.sleep(2)
held = []
(thread := threading.Thread(target=work)).start()
thread.join()
len(held) == 2 or sys.exit("full")
""",
    "removed, closed and mapped": """
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
for i in "12":
    f = nameless()
    libc.mmap(None, 4096, 1, 1, f.fileno(), 0)
    f.close()
""",
    "removed and on its way through a socket": """
ours, theirs = socket.socketpair()
for i in "12":
    f = nameless()
    socket.send_fds(ours, [b"x"], [f.fileno()])
    f.close()
""",
    "removed, in a process that hides": "held = [nameless(), nameless()]\nlibc.prctl(4, 0, 0, 0, 0)",
}
SLIPPED = "\ntime.sleep(2)\nprint('slipped')"
PAST = {"memory": (PAST_MEMORY, ""), "CPU time": (PAST_CPU, ""), "files": (PAST_FILES, SLIPPED)}
HONEST = {
    "one piece that many share": """
m = mmap.mmap(-1, 60 << 20)
for _ in range(3): fill(m)
for _ in range(5):
    if os.fork() == 0:
        sum(m[at] for at in range(0, 60 << 20, 4096))
        time.sleep(0.3)
        os._exit(0)
for _ in range(5): os.wait()
print("ok")
""",
    "files without a name that keep within the limit": """
import tempfile
with tempfile.TemporaryFile() as f:
    fill(f)
    f.flush()
    m = mmap.mmap(f.fileno(), 20 << 20)
    a, b = socket.socketpair()
    os.mkdir("dark", 0o300)
    time.sleep(0.3)
print("ok")
""",
    "files that cannot be measured for an instant": """
import tempfile
ours, theirs = socket.socketpair()
for _ in range(10):
    f = tempfile.TemporaryFile()
    fill(f)
    f.flush()
    libc.mmap.restype, libc.munmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    at = libc.mmap(None, 20 << 20, 1, 1, f.fileno(), 0)
    socket.send_fds(ours, [b"x"], [f.fileno()])
    f.close()
    time.sleep(0.03)
    os.close(socket.recv_fds(theirs, 1, 1)[1][0])
    time.sleep(0.03)
    libc.munmap(at, 20 << 20)
    time.sleep(0.05)
print("ok")
""",
}

LIMITS = Limits(wall_s=60, cpu_s=30, memory_mib=160, file_mib=32)
SOURCES = {f"{limit} {how}": PRELUDE + source + end for limit, (table, end) in PAST.items() for how, source in table.items()}
SOURCES |= {name: PRELUDE + source for name, source in HONEST.items()}


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def outcomes(request):
    """The ends of all programs in one back end."""
    try:
        sandbox = choose_sandbox(request.param, size=2)
    except ConfigError as error:
        pytest.skip(f"{request.param} does not work here: {str(error).splitlines()[1]}")

    async def run_all():
        cpu = replace(LIMITS, cpu_s=0.5, memory_mib=2048)  # many processes may be there at once
        limits = [cpu if name.startswith("CPU") else LIMITS for name in SOURCES]
        programs = [Program(source=source) for source in SOURCES.values()]
        return await asyncio.gather(*map(sandbox.run, programs, limits))

    ends = dict(zip(SOURCES, asyncio.run(run_all()), strict=True))
    sandbox.close()
    return ends


@pytest.mark.parametrize("how", PAST_MEMORY)
def test_memory_counts_wherever_it_is(outcomes, how):
    assert outcomes[f"memory {how}"].status == "memory", outcomes[f"memory {how}"]


@pytest.mark.parametrize("how", PAST_CPU)
def test_cpu_time_counts_whoever_uses_it(outcomes, how):
    outcome = outcomes[f"CPU time {how}"]
    assert (outcome.status, outcome.seconds < 45) == ("timeout", True), outcome


@pytest.mark.parametrize("how", PAST_FILES)
def test_files_count_however_they_are_hidden(outcomes, how):
    outcome = outcomes[f"files {how}"]
    full = outcome.status == "exit" and outcome.stderr.endswith((b"full\n", b"No space left on device\n", b"'dark/19996'\n"))
    assert full or (outcome.status, outcome.exit_code) == ("files", -9), outcome
    assert b"slipped" not in outcome.stdout


@pytest.mark.parametrize("name", HONEST)
def test_a_program_that_keeps_within_its_limits_is_left_alone(outcomes, name):
    assert (outcomes[name].status, outcomes[name].stdout) == ("ok", b"ok\n"), outcomes[name]
