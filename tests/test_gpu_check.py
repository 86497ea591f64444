"""The check for GPU machines: its plan, its limits, its results; every part of it on a CPU; and all that only a GPU runs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from scripts.gpu_check.command import CHECKS
from scripts.gpu_check.cuda_only import CUDA_LINES
from scripts.gpu_check.needs import NEEDED, missing

ROOT = Path(__file__).resolve().parents[1]

FAKE = """
import os, pathlib, signal, subprocess, sys, time, types

def Place(device, scratch, out, quick, vllm_python):
    return out

def line(what, good=True):
    return types.SimpleNamespace(what=what, found="yes", limit="yes", good=good)

def first(out):
    yield line("the first runs")

def hangs(out):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (out / "pids").write_text(f"{os.getpid()} {child.pid}")
    yield line("begun")
    time.sleep(600)

def dies(out):
    yield line("begun")
    os._exit(9)

def raises(out):
    yield line("wrong", good=False)
    raise ValueError("a | bad value")

def last(out):
    yield line("the last runs")
"""
DRIVER = """
import sys
from scripts.gpu_check.command import main
from scripts.gpu_check.report import Check
checks = [Check(f"fake_checks.{name}", "what", 1, 5 if name == "hangs" else 60) for name in sys.argv[1].split()]
if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], checks))
"""


def started(tmp_path: Path, checks: str, *words: str) -> subprocess.Popen:
    """The command with checks of `FAKE`; ``checks``: their names. `hangs` has a limit of 5 s."""
    (tmp_path / "fake_checks.py").write_text(FAKE)
    (tmp_path / "driver.py").write_text(DRIVER)
    path = os.pathsep.join(map(str, (ROOT, ROOT / "src", tmp_path)))
    command = [sys.executable, tmp_path / "driver.py", checks, "--device", "cpu", "--out", tmp_path / "out", *words]
    with (tmp_path / "said").open("w") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | {"PYTHONPATH": path})


def has_ended(pid: int) -> bool:
    """True as soon as the process is gone; waits up to a minute."""
    for _ in range(600):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_a_check_that_hangs_or_dies_is_ended_and_the_others_run(tmp_path):
    process = started(tmp_path, "first hangs dies raises last")
    assert process.wait(120) == 4, (tmp_path / "said").read_text()  # killed, died, wrong, raised
    page = (tmp_path / "out/results.md").read_text()
    assert all(has_ended(int(pid)) for pid in (tmp_path / "out/pids").read_text().split())  # the check and its own child
    assert "| the first runs | yes | yes | yes |" in page and "| the last runs | yes | yes | yes |" in page
    assert page.count("| begun | yes | yes | yes |") == 2
    assert "killed after 5 s" in page and "died with status 9" in page and "Not run" not in page
    assert "| wrong | yes | yes | **NO** |" in page and "ValueError: a \\| bad value" in page


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_killed_has_left_all_results_so_far(tmp_path, number):
    process = started(tmp_path, "first hangs last")
    while process.poll() is None and "begun" not in (tmp_path / "said").read_text():
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert all(has_ended(int(pid)) for pid in (tmp_path / "out/pids").read_text().split())
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert [(row["check"], row.get("what", "end")) for row in rows] == [
        ("first", "the first runs"),
        ("first", "end"),
        ("hangs", "begun"),
    ]
    page = (tmp_path / "out/results.md").read_text()
    assert "| the first runs | yes | yes | yes |" in page and "Not run: hangs, last." in page


def test_a_check_without_time_is_named_and_has_not_failed(tmp_path):
    process = started(tmp_path, "first hangs last", "--minutes", "0.08")
    assert process.wait(120) == 0, (tmp_path / "said").read_text()
    assert "2 not run to their end: give more --minutes" in (tmp_path / "said").read_text()
    page = (tmp_path / "out/results.md").read_text()
    assert "the time of all checks was over" in page and "| begun | yes | yes | yes |" in page and "Not run: last." in page


def test_the_plan_is_printed_by_a_python_without_any_library():
    command = [sys.executable, "-S", "-m", "scripts.gpu_check", "--plan"]
    first, then = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("Then:")
    names = re.findall(r"^  \d:\d\d  (\w+) +at most +\d+ s  \w", first, re.M)
    assert names[:2] == ["versions", "engine_is_transformers"]
    places = [
        names.index(name) for name in ("repeats", "memory_is_handed_back", "training_short", "training_long", "decode")
    ]
    assert places == sorted(places)
    assert [*names, *re.findall(r"^  \d:\d\d  (\w+)", then, re.M)] == [check.name for check in CHECKS]


def test_a_package_that_is_missing_is_named(monkeypatch):
    assert missing() == []
    monkeypatch.setitem(NEEDED, "no_such_module", "no-such-distribution")
    assert missing() == ["no-such-distribution"]


def test_wheels_give_the_packages_that_are_not_installed_and_no_others(tmp_path):
    for name, code in (
        ("lent_package", "here = True"),
        ("psutil", "raise ImportError('a wheel in place of what is installed')"),
    ):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", code)
    code = "from scripts.gpu_check.needs import unpack; from pathlib import Path; import sys, subprocess\n"
    code += f"unpack(Path({str(tmp_path)!r}), Path({str(tmp_path / 'site')!r}))\nimport lent_package, psutil\n"
    code += "subprocess.run([sys.executable, '-c', 'import lent_package, psutil'], check=True)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_all_lines_that_only_a_gpu_runs_are_named_in_one_file():
    source = ROOT / "src/tandem"
    word = re.compile(r"is_cuda|torch\.cuda|[\"']cuda|nccl")
    found = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if word.search(path.read_text())}
    assert {name for name in found if not name.startswith("config/")} == set(CUDA_LINES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_part_runs_on_a_cpu_at_small_size_and_passes(tmp_path):
    words = [sys.executable, "-m", "scripts.gpu_check", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=580, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "results.md").read_text()
    assert "Not run" not in page and "**NO**" not in page
    assert [check.name for check in CHECKS if not re.search(rf"## {check.name}: .*\n\ndone, ", page)] == []
    said = ("engine = transformers, bf16", "packed = one by one, fp32", "delivered = trained, bf16, decoupled", "MFU")
    assert [words for words in said if words not in page] == []
    assert "calls  aten::mm" in (tmp_path / "training_short.txt").read_text()
