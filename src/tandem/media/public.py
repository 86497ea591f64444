"""Fetches published pictures and recordings for data sets and built-in models, once, into the cache."""

import os
import re
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

from tandem.api.shared_files import Package, make_once
from tandem.config.errors import ConfigError
from tandem.config.libraries import cache_folder

EASY_VQA = Package("easy-vqa", "1.0", "easy_vqa", megabytes=22)

DIGITS_FOLDER = "TANDEM_SPOKEN_DIGITS"
"""Environment variable with the folder of a copy of the Free Spoken Digit Dataset."""

DIGITS_URL = "https://github.com/Jakobovski/free-spoken-digit-dataset/archive/refs/tags/v1.0.10.tar.gz"
_RECORDING = re.compile(r"\d_[a-z]+_\d+\.wav")


def easy_vqa_folder() -> Path:
    """Returns the folder ``data`` of easy-VQA (MIT); its folders ``train`` and ``test`` have ``questions.json`` and
    ``images/N.png``.

    Raises:
        ConfigError: the package cannot be fetched.
    """
    installed = EASY_VQA.installed("data")
    if installed is not None:
        return installed
    folder = cache_folder() / "packages" / EASY_VQA.requirement
    make_once(folder, EASY_VQA.fetch)
    return folder / EASY_VQA.module / "data"


def spoken_digit_files(split: str) -> list[Path]:
    """Returns the recordings of the Free Spoken Digit Dataset (CC-BY-SA-4.0), ``DIGIT_SPEAKER_TAKE.wav``. As its authors
    recommend, takes 0 to 4 of each digit and speaker are `test`; the others are `train`.

    Raises:
        ConfigError: the recordings are missing and cannot be fetched.
    """
    user_folder = os.environ.get(DIGITS_FOLDER)
    folder = Path(user_folder).expanduser() if user_folder else cache_folder() / "spoken_digits"
    if not user_folder:
        make_once(folder, _fetch_digits)
    files = sorted(file for file in folder.rglob("*.wav") if _RECORDING.fullmatch(file.name))
    if not files:
        raise ConfigError(f"{DIGITS_FOLDER}={user_folder or folder} has no recordings such as 7_jackson_32.wav; {_BY_HAND}")
    return [file for file in files if (int(file.stem.split("_")[2]) < 5) == (split == "test")]


_BY_HAND = (
    "clone https://github.com/Jakobovski/free-spoken-digit-dataset on a machine with network access, and set "
    f"{DIGITS_FOLDER} to that folder"
)


def _fetch_digits(folder: Path) -> None:
    print("Fetching the Free Spoken Digit Dataset from GitHub (CC-BY-SA-4.0) …", file=sys.stderr)
    with tempfile.TemporaryFile() as archive:
        try:
            with urllib.request.urlopen(DIGITS_URL, timeout=60) as answer:
                shutil.copyfileobj(answer, archive)
            archive.seek(0)
            with tarfile.open(fileobj=archive) as files:
                for member in files:
                    name = Path(member.name).name
                    content = files.extractfile(member) if _RECORDING.fullmatch(name) else None
                    if content is not None:
                        (folder / name).write_bytes(content.read())
        except (OSError, tarfile.TarError) as error:
            raise ConfigError(
                f"the Free Spoken Digit Dataset could not be fetched from {DIGITS_URL} ({error}); {_BY_HAND}"
            ) from error
