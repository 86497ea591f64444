"""Names from users become parts of paths, so they are checked first."""

import re

from tandem.config.errors import ConfigError

_ALLOWED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
MAX_LENGTH = 100


def check_name(key: str, name: str) -> str:
    """Returns the name if it can be one folder's name.

    Raises:
        ConfigError: names the key, the value and the rule.
    """
    if not isinstance(name, str) or not _ALLOWED.fullmatch(name) or len(name) > MAX_LENGTH:
        raise ConfigError(
            f"{key} must be the name of one folder: letters, digits, '.', '_' and '-', not starting with '.' or '-', "
            f"at most {MAX_LENGTH} characters; got {name!r}"
        )
    return name
