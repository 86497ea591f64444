"""The page that lets Hugging Face's `datasets` load the records of a run: `load_dataset("runs/addition/grpo")`.

That library takes the types of the columns from the first lines that it sees, and a column that is empty there, such as
`why`, could hold nothing later. The page names the types: one for each field of a `RecordedSample` that lines have.
"""

import contextlib
import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from tandem.tracking.record_files import LINES
from tandem.tracking.records import FROM_LINES, RecordedSample

_HEAD = "---\n# made by tandem: the types of the records, for Hugging Face's datasets\n"
"""The beginning of a page of ours: another one, which somebody wrote, stays as it is."""

_TYPES: dict[Any, dict[str, Any]] = {
    bool: {"dtype": "bool"},
    int: {"dtype": "int64"},
    int | None: {"dtype": "int64"},
    float | None: {"dtype": "float64"},
    str: {"dtype": "string"},
    str | None: {"dtype": "string"},
    list[str]: {"list": "string"},
    list[dict[str, Any]]: {"list": "json"},
    list[list[dict[str, Any]]]: {"list": {"list": "json"}},
    dict[str, float]: {"dtype": "json"},
    dict[str, str]: {"dtype": "json"},
    Any: {"dtype": "json"},
}
"""Types of fields as that library writes them. The names in a dictionary differ from line to line: they are JSON."""


def columns() -> list[dict[str, Any]]:
    """The columns of the lines with their types, in order."""
    hints = get_type_hints(RecordedSample)
    types = ((name, _TYPES[hint]) for name, hint in hints.items() if name in FROM_LINES)
    return [{"name": name} | copy.deepcopy(kind) for name, kind in types]  # YAML would refer to one that is there twice


def write_card(run: Path, notes: Sequence[str] = ()) -> None:
    """Writes the page into the run's folder, unless there is one that is not ours. ``notes``: lines about the run.

    Raises:
        OSError: the disk refuses; there is no half of a page.
    """
    path, partial = run / "README.md", run / ".README.md.partial"
    files = [{"split": "train", "path": f"{LINES}/step_*.jsonl"}]
    card = {"configs": [{"config_name": "default", "data_files": files}], "dataset_info": {"features": columns()}}
    text = _HEAD + yaml.safe_dump(card, sort_keys=False) + "---\n\nThe recorded samples of this run: docs/records.md.\n"
    text += "".join(f"\n{note}\n" for note in notes)
    old = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else _HEAD
    if old.startswith(_HEAD) and old != text:
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
