"""Writes tests/data_files/trl/*.json: what TRL computes on small tensors, for tests that compare it with ours.

Run it in an environment of its own that has TRL (1.16 made the files): ``python scripts/trl_fixtures.py [FAMILY …]``. A
family is a file of scripts/trl_families/ with a function ``fixtures() -> dict``; its result goes into FAMILY.json.
"""

import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path

FAMILIES = Path(__file__).parent / "trl_families"
OUT = Path(__file__).parents[1] / "tests/data_files/trl"


def family(path: Path) -> dict:
    """The record that one family's file makes."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fixtures()


def main(names: list[str]) -> None:
    """All families, or those that are named."""
    OUT.mkdir(parents=True, exist_ok=True)
    for path in sorted(FAMILIES.glob("*.py")):
        if not names or path.stem in names:
            data = {"trl": version("trl"), **family(path)}
            (OUT / f"{path.stem}.json").write_text(json.dumps(data, indent=1) + "\n")
            print(f"wrote {path.stem}.json")


if __name__ == "__main__":
    main(sys.argv[1:])
