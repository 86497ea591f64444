"""Every part of the check for GPU machines runs on a CPU, and names all that only a GPU runs."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.gpu_check import command
from scripts.gpu_check.cuda_only import CUDA_LINES
from scripts.gpu_check.needs import NEEDED, missing
from scripts.gpu_check.place import Line, Place

ROOT = Path(__file__).resolve().parents[1]


def test_all_lines_that_only_a_gpu_runs_are_named_in_one_file():
    source = ROOT / "src/tandem"
    word = re.compile(r"is_cuda|torch\.cuda|[\"']cuda|nccl")
    found = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if word.search(path.read_text())}
    assert {name for name in found if not name.startswith("config/")} == set(CUDA_LINES)


def test_a_package_that_is_missing_is_named(monkeypatch):
    assert missing() == []
    monkeypatch.setitem(NEEDED, "no_such_module", "no-such-distribution")
    assert missing() == ["no-such-distribution"]


def slow_check(place):
    yield Line("begun", "yes")
    while True:
        time.sleep(0.01)


def never_run(place):
    raise AssertionError("there is no time for it")


def test_a_check_that_is_cut_off_keeps_its_lines_and_the_rest_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "CHECKS", {"speeds": (slow_check, never_run)})
    place = Place("cpu", tmp_path, tmp_path, quick=True)
    others = signal.setitimer(signal.ITIMER_REAL, 120)
    found = command.run_all(place, ["speeds"], tmp_path / "page.md", "none", seconds=0.2)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, *others)  # the limit of this test
    assert 60 < left_s < 120  # the alarm of whoever calls goes on
    page = (tmp_path / "page.md").read_text()
    assert found.failed == 0 and "| begun | yes |" in page
    assert "Not run, because the time was over: slow_check (cut off after 0 s), never_run." in page


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_at_small_size_and_passes(tmp_path):
    words = [sys.executable, "-m", "scripts.gpu_check", "--device", "cpu", "--quick", "--out", str(tmp_path / "page.md")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "page.md").read_text()
    for heading in ("## Placement", "## Equalities", "## Speeds", "## Learning"):
        assert heading in page
    said = ("engine = transformers, bf16", "packed = one by one, fp32", "delivered = trained, bf16, decoupled", "MFU")
    assert [words for words in said if words not in page] == []
    assert "| yes |" in page and "**NO**" not in page
