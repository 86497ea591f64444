"""A GPU that is pretended: tensors that say they are on ``cuda:0``, and are computed on the CPU.

Python sees `is_cuda` and takes the ways of a GPU, numbers are those of the CPU, an operation with tensors of both devices
fails as it would on a GPU, and every wait of the host for the device is written down, with the line of the source that
waits. With `torch.use_deterministic_algorithms` what torch refuses on a GPU is refused. What no pretence shows: kernels and
their numbers, streams, memory.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tandem.engines.inference import paged_kernel
from tests import paged_reference
from tests.varlen_reference import varlen_backward, varlen_forward

GPU, META, CPU = torch.device("cuda:0"), torch.device("meta"), torch.device("cpu")
SOURCE = str(Path(__file__).resolve().parents[1] / "src")
aten = torch.ops.aten

DATA_DEPENDENT = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
"""Operations whose result has a size that only the device knows."""


REFUSED = {
    "nn.AvgPool3d": "avg_pool3d_backward",
    "nn.AdaptiveAvgPool2d": "_adaptive_avg_pool2d_backward",
    "nn.AdaptiveAvgPool3d": "_adaptive_avg_pool3d_backward",
    "nn.AdaptiveMaxPool2d": "adaptive_max_pool2d_backward",
    "nn.FractionalMaxPool2d": "fractional_max_pool2d_backward",
    "nn.FractionalMaxPool3d": "fractional_max_pool3d_backward",
    "nn.MaxUnpool1d": "max_unpool2d",
    "nn.MaxUnpool2d": "max_unpool2d",
    "nn.MaxUnpool3d": "max_unpool3d",
    "nn.functional.interpolate": "upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward "
    "upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward",
    "nn.ReflectionPad1d": "reflection_pad1d_backward",
    "nn.ReflectionPad2d": "reflection_pad2d_backward",
    "nn.ReflectionPad3d": "reflection_pad3d_backward",
    "nn.NLLLoss": "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward",
    "nn.CTCLoss": "_ctc_loss_backward",
    "nn.EmbeddingBag": "_embedding_bag_dense_backward",
    "Tensor.put_": "put put_",
    "histc": "histc",
    "bincount": "bincount",
    "kthvalue": "kthvalue",  # torch 2.11
    "median": "median nanmedian",
    "nn.functional.grid_sample": "grid_sampler_2d_backward grid_sampler_3d_backward",
    "cumsum": "cumsum cumsum_",
    "Tensor.scatter_reduce": "scatter_reduce scatter_reduce_",
    "Tensor.resize_": "resize_",
}
"""Functions without a fixed order on a GPU, by their names in torch's documentation → their operations."""

ONLY_IF = {
    "bincount": lambda args: len(args) > 1 and args[1] is not None,  # weights
    "median": lambda args: len(args) > 1,  # along a dimension, so with indices
    "nanmedian": lambda args: len(args) > 1,
    "cumsum": lambda args: args[0].dtype.is_floating_point,
    "cumsum_": lambda args: args[0].dtype.is_floating_point,
    "scatter_reduce": lambda args: args[4] == "prod",
    "scatter_reduce_": lambda args: args[4] == "prod",
    "resize_": lambda args: args[0].is_quantized,
}
"""Operations that are refused with some arguments only."""

UNORDERED = {name for names in REFUSED.values() for name in names.split()}

MAKING = (torch.nn.functional.scaled_dot_product_attention, torch.Tensor.backward, torch.where)
"""Functions that make tensors beside those that they are given, in C++."""


class OnGpu(torch.Tensor):
    """A tensor of the pretended GPU. To C++ it is one of the device ``meta``, which needs no driver."""

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=META,
        )

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"OnGpu({self.inner})"

    def _set_data(self, value):
        torch._C.TensorBase.data.__set__(self, value)
        self.inner = value.inner

    data = property(lambda self: self.detach(), _set_data)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _Dispatch.current.compute(func, args, kwargs or {})


class Waits:
    """Counts the waits of the host, by the place in the source."""

    def __init__(self):
        self.places: Counter[str] = Counter()

    def add(self, what: str) -> None:
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
            frame = frame.f_back
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}:{frame.f_lineno}" if frame else "outside"
        self.places[f"{what} in {where}"] += 1

    @property
    def count(self) -> int:
        return self.places.total()


def _is_gpu(device) -> bool:
    return device is not None and torch.device(device).type in ("cuda", "meta")


class _Dispatch(TorchDispatchMode):
    current: "_Dispatch"

    def __init__(self, waits: Waits):
        super().__init__()
        self.waits, self.pinned = waits, set()
        self.inside = False
        """True if C++ makes tensors beside those that it is given, on what it takes for their device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        named = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if (
            named == "cuda"
            or (named == "meta" and self.inside)
            or any(isinstance(x, OnGpu) for x in tree_leaves((args, kwargs)))
        ):
            return self.compute(func, args, kwargs)
        return func(*args, **kwargs)

    def compute(self, func, args, kwargs):
        if func.overloadpacket is aten.to:  # as it comes in inference mode, where nothing takes it apart before
            with self:
                return func.decompose(*args, **kwargs)
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = {id(x.inner): x for x in leaves if isinstance(x, OnGpu)}
        name = func.overloadpacket.__name__
        home = _is_home(func, args, kwargs)
        if home and name == "copy_" and len(args) > 2 and args[2] and args[0].data_ptr() in self.pinned:
            args[0].copy_(args[1].inner)
            return args[0]
        self._check(name, args, kwargs, leaves, home)
        if torch.are_deterministic_algorithms_enabled() and name in UNORDERED and ONLY_IF.get(name, bool)(args):
            raise RuntimeError(f"{name} does not have a deterministic implementation on cuda:0")
        inner_args, inner_kwargs = tree_map(lambda x: x.inner if isinstance(x, OnGpu) else x, (args, kwargs))
        if _is_gpu(inner_kwargs.get("device")):
            inner_kwargs = inner_kwargs | {"device": CPU}
        if name in ("_varlen_attn", "_varlen_attn_backward"):
            found = (varlen_forward if name == "_varlen_attn" else varlen_backward)(*inner_args, **inner_kwargs)
        else:
            found = func(*inner_args, **inner_kwargs)
        if name == "_local_scalar_dense" or home:
            return args[0] if name == "copy_" else found

        def wrapped(x):
            if not isinstance(x, torch.Tensor) or isinstance(x, OnGpu):
                return x
            return there[id(x)] if id(x) in there else OnGpu(x)

        return tree_map(wrapped, found)

    def _check(self, name, args, kwargs, leaves, home):
        """Counts waits, and refuses tensors of two devices in one operation."""
        if name in DATA_DEPENDENT or name == "_local_scalar_dense" or home:
            self.waits.add(name)
        by_tensor = len(args) == 1 or any(isinstance(x, torch.Tensor) for x in args[1:])
        if name == "repeat_interleave" and by_tensor and kwargs.get("output_size") is None:
            self.waits.add(name)
        if name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        ):
            self.waits.add(f"{name} by a mask")
        hosts = [x for x in leaves if not isinstance(x, OnGpu) and x.dim() and x.device.type == "cpu"]
        if not hosts or home:
            return
        if name in ("copy_", "_to_copy"):
            free = (args[2] if len(args) > 2 else kwargs.get("non_blocking")) and hosts[0].data_ptr() in self.pinned
            if not free:
                self.waits.add("upload")
        elif name in ("index", "index_put", "index_put_"):
            self.waits.add(f"{name} with indices of the host")
        else:
            raise RuntimeError(f"{name}: tensors are on cuda:0 and on cpu")


def _is_home(func, args, kwargs) -> bool:
    """True if an operation copies from the device to the host."""
    if func is aten._to_copy.default:
        return kwargs.get("device") is not None and not _is_gpu(kwargs["device"]) and isinstance(args[0], OnGpu)
    return func is aten.copy_.default and isinstance(args[1], OnGpu) and not isinstance(args[0], OnGpu)


class _Functions(TorchFunctionMode):
    """Functions that do not reach the dispatcher."""

    def __init__(self, dispatch: _Dispatch):
        super().__init__()
        self.dispatch = dispatch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        named = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and named is not None and torch.device(named).type == "cuda":
            rest = {name: value for name, value in kwargs.items() if name != "device"}
            return func(*args, **rest).to(GPU)
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and isinstance(args[0], OnGpu):
            if func is torch.Tensor.numpy:
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            self.dispatch.waits.add("tolist")
            return args[0].inner.tolist()
        if func is torch.Tensor.data_ptr and isinstance(args[0], OnGpu):
            return args[0].inner.data_ptr()
        if func in MAKING and isinstance(args[0], OnGpu):
            self.dispatch.inside = True
            try:
                return func(*args, **kwargs)
            finally:
                self.dispatch.inside = False
        if func is torch.Tensor.__setitem__ and isinstance(args[0], OnGpu) and torch.is_inference_mode_enabled():
            return self._put(*args)
        if func is torch.Tensor.pin_memory:
            copy = args[0].clone()
            self.dispatch.pinned.add(copy.data_ptr())
            return copy
        return func(*args, **kwargs)

    def _put(self, tensor, index, value):
        """An assignment in inference mode, where C++ would write to a tensor of its own."""
        parts = index if isinstance(index, tuple) else (index,)
        value = value.inner if isinstance(value, OnGpu) else value
        if any(isinstance(part, torch.Tensor) and (part.dtype == torch.bool or part.is_cpu) for part in parts):
            self.dispatch.waits.add("index_put_ by a mask, or with indices of the host")
        tensor.inner[tuple(part.inner if isinstance(part, OnGpu) else part for part in parts)] = value


class _Event:
    """Waits for what came before it."""

    def record(self, stream):
        pass

    def synchronize(self):
        _Dispatch.current.waits.add("event")


def _attend(*args):
    """The decode kernel, which is given addresses."""
    return OnGpu(paged_reference.attend(*(x.inner if isinstance(x, OnGpu) else x for x in args)))


@contextlib.contextmanager
def pretended_gpu() -> Iterator[Waits]:
    """Inside, ``cuda:0`` is a device. Gives the waits, which may be cleared (``waits.places.clear()``)."""
    waits = Waits()
    _Dispatch.current = dispatch = _Dispatch(waits)
    start, torch.cuda._lazy_init = torch.cuda._lazy_init, lambda: None  # C++ asks for it when it reads a device
    ability, torch.cuda.get_device_capability = torch.cuda.get_device_capability, lambda device=None: (9, 0)
    event, torch.cuda.Event = torch.cuda.Event, _Event
    stream, torch.cuda.current_stream = torch.cuda.current_stream, lambda device=None: None
    attend, paged_kernel.attend = paged_kernel.attend, _attend
    takes, paged_kernel.takes = paged_kernel.takes, lambda dim: True
    try:
        with _Functions(dispatch), dispatch:
            yield waits
    finally:
        paged_kernel.attend, paged_kernel.takes = attend, takes
        torch.cuda.Event, torch.cuda.current_stream = event, stream
        torch.cuda._lazy_init, torch.cuda.get_device_capability = start, ability
