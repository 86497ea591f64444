"""Whether a model folder is still the one that it was."""

import hashlib
from collections.abc import Container
from pathlib import Path

PIECE = 1 << 20
WEIGHTS = (".safetensors", ".bin")
ENDINGS = (*WEIGHTS, ".json", ".jinja", ".model", ".txt")


def fingerprint(folder: Path, endings: Container[str] = ENDINGS) -> str:
    """Of a model folder: names and sizes of its files (with these endings), and a MiB from the beginning, middle and end of
    each.

    Training changes every tensor, so pieces are enough, and a large model is not read twice.
    """
    digest = hashlib.sha256()
    for file in sorted(f for f in folder.iterdir() if f.suffix in endings and f.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as content:
            for place in sorted({0, max(0, size // 2 - PIECE // 2), max(0, size - PIECE)}):
                content.seek(place)
                digest.update(content.read(PIECE))
    return digest.hexdigest()[:16]
