"""What the system says of a process."""

import contextlib
from pathlib import Path

import psutil

from tandem.launch.watch import Used


def work_of(pid: int, *, whole: bool = False) -> Used:
    """What the system says of a process; ``whole``: of its child processes and its disk too, which costs more to ask."""
    process = psutil.Process(pid)
    times, moved, below = process.cpu_times(), 0, None
    with contextlib.suppress(psutil.Error, AttributeError):  # macOS counts no bytes
        io = process.io_counters()
        moved = io.read_chars + io.write_chars
    if whole:
        below = times.children_user + times.children_system  # of those that are gone
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                its = child.cpu_times()
                below += its.user + its.system + its.children_user + its.children_system
    return Used(times.user + times.system, moved, below, whole and waits_for_disk(process))


def waits_for_disk(process: psutil.Process) -> bool:
    """Whether a thread of it waits for a disk."""
    if process.status() == psutil.STATUS_DISK_SLEEP:
        return True
    states = set()
    for path in Path(f"/proc/{process.pid}/task").glob("*/stat"):  # Linux
        with contextlib.suppress(OSError):  # it has just ended
            states.add(path.read_text().rpartition(")")[2].split()[0])
    return "D" in states
