"""`.ci/run` ends well within 90 minutes, whatever the machine's mood."""

import re
from pathlib import Path

SCRIPT = (Path(__file__).parents[1] / ".ci/run").read_text()


def test_the_limits_of_all_parts_together_leave_room_before_ninety_minutes():
    limits = {name: int(limit) for name, limit in re.findall(r"^ *check (\w+) (\d+) ", SCRIPT, re.M)}
    assert set(limits) == {"setup", "lint", "site", "test", "invariants"}
    assert sum(limits.values()) <= 75 * 60
