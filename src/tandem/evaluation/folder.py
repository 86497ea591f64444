"""The folder of an evaluation: its settings, its samples, from which an interrupted evaluation continues, and its results.

`samples.jsonl` has one line a sample, in order, and is written wave by wave. An evaluation that continues removes an
incomplete last wave and generates it again. No file contains the time of day, so an interrupted evaluation ends with the
same bytes as an uninterrupted one.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any, Self

from tandem.api.shared_files import json_line, write_atomically
from tandem.config.errors import ConfigError, kind_and_text
from tandem.config.evaluation import NOT_PART_OF_THE_RESULT, differences
from tandem.evaluation.asking import Answer, Ask
from tandem.state.existing import refuse_held, take_lock
from tandem.state.run_folder import require_writable

SHOWN = 6
IN_USE = "{folder} is being written by another evaluation: {who}; wait for it, or choose another label"
SETTINGS, SAMPLES, RESULTS = "evaluation.json", "samples.jsonl", "results.json"


class EvaluationFolder:
    """The folder of an evaluation, locked by this process until `close`. A context manager."""

    def __init__(self, path: Path, lock: IO[str], settings: Mapping[str, Any]):
        self.path, self._settings = path, settings
        self._lock: IO[str] | None = lock
        self._file: IO[bytes] | None = None

    @classmethod
    def open(cls, path: Path, settings: Mapping[str, Any]) -> Self:
        """Creates the folder, or opens it to continue its evaluation.

        Raises:
            ConfigError: another process writes to the folder, or it holds other files or an evaluation with other settings
                (the message names each key and both values).
        """
        _refuse_unwritable(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = take_lock(path, IN_USE)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            if not _agree(path, settings):
                _write(path / SETTINGS, settings)
        except BaseException:
            lock.close()
            raise
        return cls(path, lock, settings)

    @staticmethod
    def check(path: Path, settings: Mapping[str, Any] | None) -> None:
        """Checks that `open` would succeed; writes nothing. ``settings``: None if the folder does not exist yet.

        Raises:
            ConfigError: as for `open`.
        """
        _refuse_unwritable(path)
        if settings is None:
            return
        refuse_held(path, IN_USE)
        _agree(path, settings)

    def recorded(self, waves: Sequence[Sequence[Ask]]) -> list[Answer]:
        """Returns the recorded answers of all complete waves, and removes further lines from the file.

        Raises:
            ConfigError: a line belongs to another sample than the order of ``waves`` requires.
        """
        file = self.path / SAMPLES
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # an incomplete line
        complete = 0
        for wave in waves:
            if complete + len(wave) > len(lines):
                break
            complete += len(wave)
        answers = [read_answer(line, self.path / SAMPLES, number) for number, line in enumerate(lines[:complete], 1)]
        expected = [ask for wave in waves for ask in wave]
        for number, (answer, ask) in enumerate(zip(answers, expected, strict=False), 1):
            if (answer.data, answer.row, answer.sample) != (ask.data, ask.row, ask.sample):
                raise ConfigError(
                    f"{self.path / SAMPLES}:{number} is sample {answer.sample} of {answer.data}, row {answer.row}, but "
                    f"should be sample {ask.sample} of {ask.data}, row {ask.row}: the file was changed; move it away"
                )
        self._file = file.open("ab")
        self._file.truncate(sum(map(len, lines[:complete])))
        return answers

    def append(self, answers: Sequence[Answer]) -> None:
        """Appends the answers of one complete wave to the file, and flushes them to disk."""
        assert self._file is not None, "recorded() comes first"
        self._file.write(b"".join(line_of(answer) for answer in answers))
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, results: Mapping[str, Any]) -> None:
        _write(self.path / RESULTS, results)
        _write(self.path / SETTINGS, self._settings)  # now with current values of irrelevant settings

    def close(self) -> None:
        for file in (self._file, self._lock):
            if file is not None:
                file.close()
        self._file = self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _refuse_unwritable(path: Path) -> None:
    """Raises `ConfigError` if the folder cannot be written to or created."""
    try:
        require_writable(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot hold an evaluation: {error.strerror or error}; set out to another folder")


def _agree(path: Path, settings: Mapping[str, Any]) -> bool:
    """Returns whether the folder holds an evaluation with these settings. Raises `ConfigError` if it holds anything else."""
    file, new_settings = path / SETTINGS, json.loads(json.dumps(settings))
    if not file.exists():
        others = sorted(entry.name for entry in path.iterdir() if entry.name != ".lock")
        if others:
            raise ConfigError(f"{path} holds other files ({', '.join(others[:3])}); set label or out to another value")
        return False
    differing = [
        f"{key.removeprefix('config.')} was {_shown(old)} and is {_shown(new)} now"
        for key, old, new in differences(read_settings(path), new_settings)
        if key.removeprefix("config.") not in NOT_PART_OF_THE_RESULT and not key.startswith("row_digests.")
    ]
    if differing:
        more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise ConfigError(
            f"{path} holds an evaluation with other settings: {'; '.join(differing[:SHOWN])}{more}. "
            "Go on with the same settings, or give this evaluation another label=…"
        )
    return True


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def read_settings(path: Path) -> dict[str, Any]:
    """Reads the settings with which an evaluation was started.

    Raises:
        ConfigError: the folder holds no evaluation, or its settings cannot be read.
    """
    try:
        settings = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} holds no evaluation ({SETTINGS} is missing); give a folder that `tandem eval` made"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / SETTINGS} cannot be read: {error}") from error
    parts = ("config", "data", "row_digests", "files")
    if not (isinstance(settings, dict) and all(isinstance(settings.get(part), dict) for part in parts)):
        raise ConfigError(f"{path / SETTINGS} does not hold an evaluation's settings, or was changed; move the folder away")
    return settings


def read_samples(path: Path) -> list[Answer]:
    """Reads all recorded answers, without an incomplete last line."""
    file = path / SAMPLES
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [read_answer(line, file, number) for number, line in enumerate(lines, 1) if line.endswith(b"\n")]


def line_of(answer: Answer) -> bytes:
    return f"{json_line(asdict(answer))}\n".encode(errors="replace")


def read_answer(line: bytes, file: Path, number: int) -> Answer:
    """Reads line ``number`` of ``file`` as an answer. Raises `ConfigError`, which names the line, if it is not an answer."""
    try:
        values = json.loads(line)
        return Answer(**{field.name: values[field.name] for field in fields(Answer)})
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}:{number} is not a sample ({kind_and_text(error)}); move the folder away") from error
