"""Token files: read where they are, made where they are not, and readable by their owner only."""

import os
import secrets
import stat
from pathlib import Path

from tandem.config.errors import ConfigError

MIN_CHARACTERS = 16


def token_from(file: Path) -> str:
    """The token in a file; a new one is made and written, mode 0600, where there is no file.

    Raises:
        ConfigError: the file can be read by others, or holds no token of at least 16 characters without white space.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(file)
    except OSError as error:
        raise ConfigError(f"the token file {file} cannot be made: {error.strerror}") from error
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(token + "\n")
    return token


def _read(file: Path) -> str:
    try:
        mode, token = stat.S_IMODE(file.stat().st_mode), file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {file} cannot be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(
            f"the token file {file} must be readable by its owner only, its mode is {mode:04o}; chmod 600 {file}"
        )
    if len(token) < MIN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token file {file} must hold one token of at least {MIN_CHARACTERS} printable characters without spaces, "
            f"it has {len(token)}; delete it and a new one is made"
        )
    return token
