"""Pure functions on tensors, registered by name. Importing this package imports all of its files, so that they register."""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__):
    if not _file.ispkg:
        import_module(f"{__name__}.{_file.name}")
