"""torch, imported when a function first uses it: commands that compute nothing read the records of the parts without it.

Every file of this room imports it from here, so that a part's record can stand beside its function.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("torch"), name)

    torch = _Torch()
