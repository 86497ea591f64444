"""For an environment with SGLang on a machine without a GPU; docs/servers.md says where it goes.

The registry's torchvision is built for CUDA. Beside a CPU build of torch it fails at its import, because it gives meaning to
operators that nobody has declared. SGLang needs of it only that it can be imported.
"""

import importlib
import importlib.abc
import sys

_MISSING = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; it declares the operators at the moment when torchvision is looked for."""

    def find_spec(self, fullname, path, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            library = importlib.import_module("torch.library")
            for name, schema in _MISSING.items():
                library.define(f"torchvision::{name}", schema)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
