"""What an evaluation's answers depend on besides its configuration: weights, user files, machine and versions."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from tandem.api.plugins import is_file_spec
from tandem.state.machine import versions

PIECE = 1 << 20
ENDINGS = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")


def fingerprint(folder: Path) -> str:
    """Of a model folder: names and sizes of its files, and a MiB from the beginning, middle and end of each.

    Training changes every tensor, so pieces are enough, and a large model is not read twice.
    """
    digest = hashlib.sha256()
    for file in sorted(f for f in folder.iterdir() if f.suffix in ENDINGS and f.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as content:
            for place in sorted({0, max(0, size // 2 - PIECE // 2), max(0, size - PIECE)}):
                content.seek(place)
                digest.update(content.read(PIECE))
    return digest.hexdigest()[:16]


def file_digests(specs: Iterable[str]) -> dict[str, str]:
    """`my_file.py` → digest, of those specs that name a user's file."""
    files = sorted({Path(spec.rpartition(":")[0]) for spec in specs if is_file_spec(spec)})
    return {str(file): hashlib.sha256(file.expanduser().read_bytes()).hexdigest()[:16] for file in files if file.exists()}


def library_versions() -> dict[str, str | None]:
    """Those that decide about bits."""
    return versions(("tandem-rl", "torch", "transformers", "numpy", "math-verify"))
