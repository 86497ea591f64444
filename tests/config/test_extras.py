"""A message about a missing library gives a command that works where it is read."""

import shlex
import sys
from pathlib import Path

from tandem.config.errors import install_extra

CLONE = Path(__file__).resolve().parents[2]


def test_in_the_clone_it_is_installed_from_here_into_the_interpreter_that_runs(monkeypatch):
    monkeypatch.chdir(CLONE)
    monkeypatch.setattr(sys, "executable", str(CLONE / ".venv/bin/python"))
    assert install_extra("data") == ".venv/bin/python -m pip install -e '.[data]'"


def test_elsewhere_the_command_names_both_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(install_extra("wandb"))
    assert Path(words[0]).samefile(sys.executable)
    assert words[1:5] == ["-m", "pip", "install", "-e"]
    folder = words[5].removesuffix("[wandb]")
    assert (Path(folder) / "pyproject.toml").is_file()
