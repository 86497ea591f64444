"""docs/sandbox.md says what the tests try."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_of_the_page_are_those_of_the_tests():
    result = subprocess.run([sys.executable, ROOT / "scripts/sandbox_page.py", "--check"], timeout=60)
    assert result.returncode == 0, "run: python scripts/sandbox_page.py"
