"""Mathematics by name: tensors in, tensors out. Importing the room registers what stands in any file of it."""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__):
    if not _file.ispkg:
        import_module(f"{__name__}.{_file.name}")
