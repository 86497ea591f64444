"""The claims of docs/lora.md name tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_claim_has_its_test():
    table = (ROOT / "docs/lora.md").read_text().partition("## Which test shows it")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "claim" not in line]
    assert len(rows) > 7
    for row in rows:
        files = re.findall(r"`(tests/[\w/]+\.py)", row)
        assert files, row
        text = "".join((ROOT / name).read_text() for name in files)
        for name in re.findall(r"::(\w+)`", row):
            assert f"def {name}(" in text, name
