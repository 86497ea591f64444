"""Builds Tandem's compiled kernels for CPUs, once per machine, with its C++ compiler, into the cache folder.

A source may be built twice: for bfloat16, which needs AVX-512 with bfloat16 dot products, and for float32, which needs AVX2.
``TANDEM_KERNELS=0`` turns all kernels off.

Also has sums of large tensors for training in bfloat16 on a CPU (`sums.cpp`), which need one pass over memory. Without the
kernels torch's operators compute the same, and copy the tensor first.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from tandem.api.activity import is_profiled, span
from tandem.config.errors import ConfigError
from tandem.config.libraries import cache_folder

logger = logging.getLogger("tandem.engine")

L = TypeVar("L")

_HEADER = Path(__file__).with_name("simd.h")
# Instruction sets are named instead of -march=native, so that a library in a shared cache folder runs on every CPU that
# loads it.
_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-w", "-mfma", "-mf16c"]
_failed: set[str] = set()
"""Compiler commands that failed; each is tried and reported once per process."""

_AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq")]


def _instructions(dtype: torch.dtype) -> list[str] | None:
    """Returns the compiler flags for ``dtype``: instruction sets and macros; None if this CPU lacks the instructions."""
    if dtype == torch.bfloat16:
        return [*_AVX512, "-mavx512bf16", "-DBFLOAT16"] if torch.cpu._is_avx512_bf16_supported() else None
    if dtype != torch.float32:
        return None
    return _AVX512 if torch.cpu._is_avx512_supported() else ["-mavx2"] if torch.cpu._is_avx2_supported() else None


def function(library: ctypes.CDLL, name: str, types: Sequence[Any], result: Any = None) -> Callable[..., Any]:
    """Returns a function of a compiled library. ``types``, ``result``: its C types. A profile shows its calls like torch's
    operators."""
    compiled = library[name]
    compiled.argtypes, compiled.restype = types, result
    shown = f"kernel: {name}"

    def call(*arguments: Any) -> Any:
        if not is_profiled():  # checked first, since there are a hundred calls per token
            return compiled(*arguments)
        with span(shown):
            return compiled(*arguments)

    return call


def load(
    source: Path, dtype: torch.dtype, opened: Callable[[Path, torch.dtype], L], build_timeout_s: float = 120
) -> L | None:
    """Loads the library of ``source`` for numbers of ``dtype``, and builds it first if necessary. Returns None if this is
    impossible; a missing or failing compiler is reported in the log.

    ``opened``: opens the file of a library with `ctypes`. torch has already loaded its OpenMP library under the same name,
    so both share one thread pool.

    Raises:
        ConfigError: ``TANDEM_KERNELS`` is neither 0 nor 1.
    """
    setting = os.environ.get("TANDEM_KERNELS") or "1"
    if setting not in ("0", "1"):
        raise ConfigError(f"TANDEM_KERNELS must be 0, which turns the compiled kernels off, or 1, got {setting!r}")
    instructions = _instructions(dtype)
    if setting == "0" or platform.system() != "Linux" or instructions is None:
        return None
    compiler = shlex.split(os.environ.get("CXX", "")) or [path for path in map(shutil.which, ("g++", "c++")) if path][:1]
    if not compiler:
        logger.warning("no C++ compiler: this run computes with torch's operators, up to a third slower; install g++")
        return None
    if shlex.join(compiler) in _failed:
        return None
    try:
        return _loaded(source, [*compiler, *_FLAGS, *instructions], lambda path: opened(path, dtype), build_timeout_s)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        _failed.add(shlex.join(compiler))
        words = getattr(error, "stderr", None) or str(error)
        logger.warning(
            "this run computes with torch's operators, up to a third slower: %s (the compiler, CXX or g++) did not build "
            "compiled kernels: %s", shlex.join(compiler), str(words).strip()[-500:],
        )  # fmt: skip
        return None


def _loaded(source: Path, command: list[str], opened: Callable[[Path], L], timeout_s: float) -> L:
    """Loads the library from the cache folder, and builds it there if it is missing or cannot be loaded. If the cache folder
    is not writable, the library is built in a temporary folder for this process only."""
    key = hashlib.sha256(_HEADER.read_bytes() + source.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    path = cache_folder() / "kernels" / f"{key}.so"
    if path.exists():
        try:
            return opened(path)
        except OSError as error:
            logger.warning("the kernels are built again: %s", error)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=path.parent)
    except OSError as error:
        logger.warning("each process builds its kernels again; set TANDEM_CACHE to a folder that can be written: %s", error)
        with tempfile.TemporaryDirectory() as temporary:
            return opened(_built(source, command, Path(temporary), timeout_s))  # the loaded library outlives its file
    with folder:
        built = _built(source, command, Path(folder.name), timeout_s)
        built.replace(path)  # atomic: a process never loads a file that another one is still writing
    return opened(path)


def _built(source: Path, command: list[str], folder: Path, timeout_s: float) -> Path:
    library = folder / "kernels.so"
    print(f"compiling {source.name}, once for this machine (up to a minute) …", file=sys.stderr, flush=True)
    command = [*command, f"-I{_HEADER.parent}", "-o", str(library), str(source)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as compiling:
        try:
            out, err = compiling.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(compiling.pid, signal.SIGKILL)  # also the processes that the compiler has started
            raise
    if compiling.returncode:
        raise subprocess.CalledProcessError(compiling.returncode, command, out, err)
    return library


class _Sums:
    """The functions of the library `sums.cpp`."""

    def __init__(self, path: Path, dtype: torch.dtype):
        library = ctypes.CDLL(str(path))
        pointer, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self.add_to = function(library, "add_to", [pointer, pointer, number, threads])
        self.square_sum = function(library, "square_sum", [pointer, number, threads], ctypes.c_double)


@functools.cache
def _library() -> _Sums | None:
    return load(Path(__file__).with_name("sums.cpp"), torch.bfloat16, _Sums)


def _library_for(*tensors: tuple[torch.Tensor, torch.dtype]) -> _Sums | None:
    """Returns the library if each tensor is contiguous, on a CPU and of its dtype, else None."""
    plain = all(x.device.type == "cpu" and x.dtype == dtype and x.is_contiguous() for x, dtype in tensors)
    return _library() if plain else None


def add_to(total: torch.Tensor, part: torch.Tensor) -> None:
    """Computes ``total += part``; both have the same shape. The result is bit-identical with and without kernels."""
    library = _library_for((total, torch.float32), (part, torch.bfloat16))
    if library is None:
        total.add_(part)
    else:
        library.add_to(total.data_ptr(), part.data_ptr(), total.numel(), torch.get_num_threads())


def square_sum(x: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squares of float32 numbers, ``[]`` float64. Squares are float64 with kernels, else float32."""
    library = _library_for((x, torch.float32))
    if library is None:
        return x.pow(2).sum(dtype=torch.float64)
    return torch.tensor(library.square_sum(x.data_ptr(), x.numel(), torch.get_num_threads()), dtype=torch.float64)
