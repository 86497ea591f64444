"""The table of faults in docs/supervision.md names tests that exist, and the times that the code has."""

import re
from pathlib import Path

from tandem.config.experiment import RecoverConfig
from tandem.launch import local, rank, watch

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/supervision.md").read_text()


def test_every_fault_has_its_test():
    rows = PAGE.partition("## Faults")[2].partition("*Stacks*")[0]
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    lines = [line for line in rows.splitlines() if line.startswith("| ")][1:]
    named = [re.findall(r"`([\w/]*test_\w+\.py)(?:::(\w+))?`", line.rpartition(" | ")[2]) for line in lines]
    assert len(lines) > 10 and all(named)
    for path, function in (pair for line in named for pair in line):
        assert "/" not in path or (ROOT / path).is_file(), path
        assert not function or f"def {function}(" in files[Path(path).name], function


def test_the_times_of_the_page_are_those_of_the_code():
    config = RecoverConfig()
    assert f"`recover.grace_s` ({config.grace_s:g} s;" in PAGE
    assert config.stalled_after_s == 3600 and "`recover.stalled_after_s` (an hour)" in PAGE
    assert f"| {watch.SILENT_S + 1:.0f} s | all end within 25 s" in PAGE
    ends = local.STACKS_S + local.FAULT_TERM_S
    assert watch.SILENT_S + 1 + ends < 25 and watch.WEDGED_S + watch.WINDOW_S + ends < 30
    assert watch.GAPS == 3 and f"| {watch.WEDGED_S + watch.WINDOW_S:.0f} s, or three times the longest" in PAGE
    assert ends < 10 and watch.START_S == 600 and "is given ten minutes" in PAGE
    assert f"within {local.ONCE_S:g} s of a request" in PAGE
    assert f"all end within {local.Patience.fail_s + local.Patience.term_s:.0f} s, with its last lines" in PAGE
    assert f"what does not within {local.Patience.left_s:.0f} s is killed" in PAGE
    assert f"| {rank.LOOK_S:g} s | its ranks end as by SIGTERM, after {rank.CLOSE_S:.0f} s in any case" in PAGE
