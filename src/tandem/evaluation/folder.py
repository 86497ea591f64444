"""The folder of an evaluation: what was asked for, the record that it goes on from, and the result.

`samples.jsonl` is the record: one line a sample, in order, written wave by wave. A killed evaluation cuts it back to the
last whole wave and goes on there. Nothing in the folder tells the time, so that it is the same to the byte however often it
was interrupted.
"""

import errno
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tandem.api.lines import json_line
from tandem.config.errors import ConfigError, kind_and_text
from tandem.config.evaluation import NOT_PART_OF_THE_RESULT, differences
from tandem.evaluation.asking import Answer, Ask
from tandem.state.existing import is_held
from tandem.state.run_folder import require_writable, write_atomically

SHOWN = 6
SETTINGS, SAMPLES, RESULTS = "evaluation.json", "samples.jsonl", "results.json"


class EvaluationFolder:
    """Held by this process until `close`; a context manager."""

    def __init__(self, path: Path, lock: IO[str], settings: Mapping[str, Any]):
        self.path, self._settings = path, settings
        self._lock: IO[str] | None = lock
        self._file: IO[bytes] | None = None

    @classmethod
    def open(cls, path: Path, settings: Mapping[str, Any]) -> Self:
        """Makes the folder, or takes up the one that is there.

        Raises:
            ConfigError: another process writes to it, it holds something else, or an evaluation with other settings;
                names each key and both values.
        """
        _refuse_unwritable(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / ".lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            _take(lock, path)
            if not _agree(path, settings):
                _write(path / SETTINGS, settings)
        except BaseException:
            lock.close()
            raise
        return cls(path, lock, settings)

    @staticmethod
    def check(path: Path, settings: Mapping[str, Any] | None) -> None:
        """Passes if `open` would make the folder, or take up the one that is there; writes nothing. ``settings``: None
        where there is no folder yet.

        Raises:
            ConfigError: as `open`.
        """
        _refuse_unwritable(path)
        if settings is None:
            return
        if is_held(path):
            raise _in_use(path)
        _agree(path, settings)

    def recorded(self, waves: Sequence[Sequence[Ask]]) -> list[Answer]:
        """The answers of all whole waves that are there; what follows them is cut off.

        Raises:
            ConfigError: a line is not that of the sample which should stand there.
        """
        file = self.path / SAMPLES
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # cut off in the middle
        whole = 0
        for wave in waves:
            if whole + len(wave) > len(lines):
                break
            whole += len(wave)
        answers = [read_answer(line, self.path / SAMPLES, number) for number, line in enumerate(lines[:whole], 1)]
        expected = [ask for wave in waves for ask in wave]
        for number, (answer, ask) in enumerate(zip(answers, expected, strict=False), 1):
            if (answer.data, answer.row, answer.sample) != (ask.data, ask.row, ask.sample):
                raise ConfigError(
                    f"{self.path / SAMPLES}:{number} is sample {answer.sample} of {answer.data}, row {answer.row}, where "
                    f"sample {ask.sample} of {ask.data}, row {ask.row} should stand: the file was changed; move it away"
                )
        self._file = file.open("ab")
        self._file.truncate(sum(map(len, lines[:whole])))
        return answers

    def append(self, answers: Sequence[Answer]) -> None:
        """One whole wave, on the disk when this returns."""
        assert self._file is not None, "recorded() comes first"
        self._file.write(b"".join(line_of(answer) for answer in answers))
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, results: Mapping[str, Any]) -> None:
        _write(self.path / RESULTS, results)
        _write(self.path / SETTINGS, self._settings)  # what may be otherwise now is as it made these results

    def close(self) -> None:
        for file in (self._file, self._lock):
            if file is not None:
                file.close()
        self._file = self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _write(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _take(lock: IO[str], path: Path) -> None:
    """The lock dies with its process, so a killed evaluation leaves none behind."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise _in_use(path) from None


def _in_use(path: Path) -> ConfigError:
    return ConfigError(f"{path} is being written by another evaluation; wait for it, or choose another label")


def _refuse_unwritable(path: Path) -> None:
    """Raises `ConfigError` where the folder can neither be written to nor made."""
    try:
        require_writable(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot hold an evaluation: {error.strerror or error}; choose another out")


def _agree(path: Path, settings: Mapping[str, Any]) -> bool:
    """True if an evaluation with these settings is there; raises `ConfigError` if something else is."""
    file, wanted = path / SETTINGS, json.loads(json.dumps(settings))
    if not file.exists():
        others = sorted(entry.name for entry in path.iterdir() if entry.name != ".lock")
        if others:
            raise ConfigError(f"{path} holds something else ({', '.join(others[:3])}); choose another label or out")
        return False
    found = read_settings(path)
    differing = [
        f"{key.removeprefix('config.')} was {_shown(then)} and is {_shown(now)} now"
        for key, then, now in differences(found, wanted)
        if key.removeprefix("config.") not in NOT_PART_OF_THE_RESULT and not key.startswith("row_digests.")
    ]
    if differing:
        more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise ConfigError(
            f"{path} holds an evaluation with other settings: {'; '.join(differing[:SHOWN])}{more}. "
            "Go on with the same settings, or give this one a label=… of its own"
        )
    return True


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def read_settings(path: Path) -> dict[str, Any]:
    """The settings that an evaluation was started with.

    Raises:
        ConfigError: the folder holds none.
    """
    try:
        found = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} holds no evaluation ({SETTINGS} is missing); give a folder that `tandem eval` made"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / SETTINGS} cannot be read: {error}") from error
    parts = ("config", "data", "row_digests", "files")
    if not (isinstance(found, dict) and all(isinstance(found.get(part), dict) for part in parts)):
        raise ConfigError(f"{path / SETTINGS} is not that of an evaluation, or was changed; move the folder away")
    return found


def read_samples(path: Path) -> list[Answer]:
    """All recorded answers, a last line that was cut off left out."""
    file = path / SAMPLES
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [read_answer(line, file, number) for number, line in enumerate(lines, 1) if line.endswith(b"\n")]


def line_of(answer: Answer) -> bytes:
    return f"{json_line(asdict(answer))}\n".encode(errors="replace")


def read_answer(line: bytes, file: Path, number: int) -> Answer:
    """Raises `ConfigError` for a line that is no answer; names it."""
    try:
        found = json.loads(line)
        return Answer(**{field.name: found[field.name] for field in fields(Answer)})
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}:{number} is not a sample ({kind_and_text(error)}); move the folder away") from error
