"""torch and `TensorDict`, imported when a function first uses them.

The plan of a run, the names of the algorithms' parts and the declarations of stages stand beside functions that compute
with tensors. Files that take both names from here can be read without torch, which takes seconds to import. Such a file
begins with ``from __future__ import annotations``, so that its annotations ask for nothing.
"""

from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from tensordict import TensorDict as TensorDict
else:

    class _Later:
        """A module, or one object of it, with the import put off to the first use."""

        def __init__(self, module: str, *path: str):
            self._module, self._path = module, path
            self._object: Any = None

        def _there(self) -> Any:
            if self._object is None:  # kept, because an import of what is there takes a microsecond, and packing asks often
                self._object = reduce(getattr, self._path, import_module(self._module))
            return self._object

        def __getattr__(self, name: str) -> Any:
            return getattr(self._there(), name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._there()(*args, **kwargs)

        def __instancecheck__(self, thing: object) -> bool:
            return isinstance(thing, self._there())

    torch = _Later("torch")
    TensorDict = _Later("tensordict", "TensorDict")
