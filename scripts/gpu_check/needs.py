"""The libraries that must be installed, asked for before anything is imported that may be missing."""

import importlib.util

NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "tensordict": "tensordict",
    "safetensors": "safetensors",
    "numpy": "numpy",
    "yaml": "pyyaml",
    "jinja2": "jinja2",
    "rich": "rich",
    "psutil": "psutil",
    "matplotlib": "matplotlib",
    "aiohttp": "aiohttp",
    "tandem": "tandem-rl (or PYTHONPATH=src)",
}
"""Module → distribution. Not datasets, math-verify or reasoning-gym: this check reads and judges its own additions."""


def missing() -> list[str]:
    """Distributions that are not installed."""
    return [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
