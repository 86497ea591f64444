"""The libraries that must be installed, asked for before anything is imported that may be missing; and their wheels."""

import importlib.metadata
import importlib.util
import os
import sys
import zipfile
from pathlib import Path

NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "huggingface_hub": "huggingface_hub",
    "tensordict": "tensordict",
    "pyvers": "pyvers",
    "safetensors": "safetensors",
    "orjson": "orjson",
    "numpy": "numpy",
    "yaml": "pyyaml",
    "jinja2": "jinja2",
    "rich": "rich",
    "psutil": "psutil",
    "matplotlib": "matplotlib",
    "aiohttp": "aiohttp",
}
"""Module → distribution. A machine with torch and transformers often lacks tensordict, pyvers (which tensordict imports) and
orjson. Neither gguf, datasets nor math-verify: models are made here, and this check reads and judges its own additions."""


def missing() -> list[str]:
    """Distributions that are not installed."""
    return [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]


def add_to_path(folder: Path) -> None:
    """Lets this process and those that it starts import from a folder, after all that they import already."""
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder))))


def unpack(wheels: Path, folder: Path) -> None:
    """Unpacks the wheels of distributions that are not installed, without pip, and makes them importable."""
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            importlib.metadata.version(wheel.name.partition("-")[0])
        except importlib.metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    add_to_path(folder)
    importlib.invalidate_caches()
