"""The promises of docs/checkpoints.md name tests that exist, and the files that a checkpoint has."""

import re
from pathlib import Path

from tandem.state import checkpoint, ledger, tree

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/checkpoints.md").read_text()


def test_every_promise_has_its_test():
    table = PAGE.partition("## What is promised")[2]
    named = re.findall(r"`([\w/]*test_\w+\.py)(?:::(\w+))?`", table)
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(named) > 10
    for path, function in named:
        assert "/" not in path or (ROOT / path).is_file(), path
        assert not function or f"def {function}(" in files[Path(path).name], function
    assert len(re.findall(r"^\| .* \| .*test_.* \|$", table, re.M)) == len(re.findall(r"^\| .* \|$", table, re.M)) - 1


def test_the_files_have_the_names_of_the_page():
    for name in (checkpoint.FILE.partition("/")[2], tree.PLAIN_FILE, tree.TENSOR_FILES.replace("*", "00001"), ledger.FILE):
        assert name in PAGE
    assert f"at {tree.FILE_BYTES // 2**30} GiB" in PAGE
