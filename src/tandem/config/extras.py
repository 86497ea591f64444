"""The command that installs an optional library, in words that work where the message is read."""

import sys
from pathlib import Path

_CLONE = Path(__file__).parents[3]


def install_extra(extra: str) -> str:
    """The command that installs an extra of Tandem: into this interpreter, from the clone where it runs from one."""
    is_clone = (_CLONE / "pyproject.toml").is_file()
    package = f"-e '{_shown(_CLONE)}[{extra}]'" if is_clone else f"'tandem-rl[{extra}]'"
    return f"{_shown(Path(sys.executable))} -m pip install {package}"


def _shown(path: Path) -> str:
    """Relative to where the user is, if it is below that; links are not followed, or an environment would lose its own."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
