"""torch and `TensorDict`, imported when a function first uses them.

Importing torch takes seconds. Files that mix light code (the plan of a run, names of an algorithm's parts, declarations of
stages) with functions on tensors take both names from here, so that they can be imported without torch. Such a file begins
with ``from __future__ import annotations``, so that its annotations are not evaluated.
"""

from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from tensordict import TensorDict as TensorDict
else:

    class _Later:
        """A module or an object of a module, imported at its first use."""

        def __init__(self, module: str, *path: str):
            self._module, self._path = module, path
            self._object: Any = None

        def _loaded(self) -> Any:
            if self._object is None:  # cached: even a repeated import takes a microsecond, and packing needs many
                self._object = reduce(getattr, self._path, import_module(self._module))
            return self._object

        def __getattr__(self, name: str) -> Any:
            return getattr(self._loaded(), name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._loaded()(*args, **kwargs)

        def __instancecheck__(self, thing: object) -> bool:
            return isinstance(thing, self._loaded())

    torch = _Later("torch")
    TensorDict = _Later("tensordict", "TensorDict")
