"""Loading a function or class that a user names as ``my_file.py:name``."""

import hashlib
import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tandem.config.errors import ConfigError


def is_file_spec(spec: str) -> bool:
    """Whether a name means a user's file, ``my_file.py:name``, and not something registered."""
    return spec.rpartition(":")[0].endswith(".py")


def load_object(spec: str) -> Any:
    """The object ``name`` of the file in ``my_file.py:name``; a file is executed once in a process.

    The file's own folder can be imported from, after everything else, as when it is run as a script.

    Raises:
        ConfigError: the spec has another form, the file is missing, or it has no such name.
    """
    source, _, name = spec.rpartition(":")
    if not source.endswith(".py") or not name:
        raise ConfigError(f"{spec!r} must have the form my_file.py:name")
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{spec!r}: there is no file {path}")
    module_name = f"tandem_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module = sys.modules.get(module_name)
    if module is None:
        found = importlib.util.spec_from_file_location(module_name, path)
        if found is None or found.loader is None:
            raise ConfigError(f"{spec!r}: {path} cannot be imported as a Python file")
        module = importlib.util.module_from_spec(found)
        sys.modules[module_name] = module
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    if not hasattr(module, name):
        names = [n for n in vars(module) if not n.startswith("_")]
        near = get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; names there: {', '.join(names) or 'none'}"
        raise ConfigError(f"{spec!r}: {path.name} has no {name!r}{hint}")
    return getattr(module, name)
