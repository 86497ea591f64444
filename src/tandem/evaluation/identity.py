"""What an evaluation's answers depend on besides its configuration: weights, user files, machine and versions."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from tandem.api.plugins import is_file_spec
from tandem.state.machine import versions


def file_digests(specs: Iterable[str]) -> dict[str, str]:
    """`my_file.py` → digest, of those specs that name a user's file."""
    files = sorted({Path(spec.rpartition(":")[0]) for spec in specs if is_file_spec(spec)})
    return {str(file): hashlib.sha256(file.expanduser().read_bytes()).hexdigest()[:16] for file in files if file.exists()}


def library_versions() -> dict[str, str | None]:
    return versions(("tandem-rl", "torch", "transformers", "numpy", "math-verify"))
