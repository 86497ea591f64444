"""The compiled kernels of Tandem for CPUs: built once with the machine's own compiler into the cache folder.

Of each source there are two libraries: one for bfloat16 numbers, which needs AVX-512 with bfloat16 dot products, and one for
float32 numbers, which needs AVX2. ``TANDEM_KERNELS=0`` turns all of them off.
"""

import ctypes
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
from tandem.config.cache import cache_folder
from tandem.config.errors import ConfigError

logger = logging.getLogger("tandem.engine")

L = TypeVar("L")

_HEADER = Path(__file__).with_name("simd.h")
# Named one by one and not -march=native, so that an object in a shared cache folder runs on every CPU that may load it.
_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-w", "-mfma", "-mf16c"]
_failed: set[str] = set()
"""Compilers that did not build a library: they are asked, and told of, once in a process."""

_AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq")]


def _instructions(dtype: torch.dtype) -> list[str] | None:
    """The compiler's flags for kernels for ``dtype``: instructions, and the kind of numbers. None: this CPU lacks some."""
    if dtype == torch.bfloat16:
        return [*_AVX512, "-mavx512bf16", "-DBFLOAT16"] if torch.cpu._is_avx512_bf16_supported() else None
    if dtype != torch.float32:
        return None
    return _AVX512 if torch.cpu._is_avx512_supported() else ["-mavx2"] if torch.cpu._is_avx2_supported() else None


def function(library: ctypes.CDLL, name: str, types: Sequence[Any], result: Any = None) -> Callable[..., Any]:
    """A function of a compiled library, from its C types; a profile shows its calls beside torch's operators."""
    compiled = library[name]
    compiled.argtypes, compiled.restype = types, result
    shown = f"kernel: {name}"

    def call(*arguments: Any) -> Any:
        if not is_profiled():  # a hundred calls a token
            return compiled(*arguments)
        with span(shown):
            return compiled(*arguments)

    return call


def load(
    source: Path, dtype: torch.dtype, opened: Callable[[Path, torch.dtype], L], build_timeout_s: float = 120
) -> L | None:
    """The library of ``source`` for numbers of ``dtype``, built now if nobody has built it yet; None, and one line in the
    log, where that is impossible.

    ``opened``: makes it from its file, with `ctypes`; torch has loaded its OpenMP before, under the same name, so both share
    one pool of threads.

    Raises:
        ConfigError: ``TANDEM_KERNELS`` is neither 0 nor 1.
    """
    wanted = os.environ.get("TANDEM_KERNELS") or "1"
    if wanted not in ("0", "1"):
        raise ConfigError(f"TANDEM_KERNELS must be 0, which turns the compiled kernels off, or 1, got {wanted!r}")
    instructions = _instructions(dtype)
    if wanted == "0" or platform.system() != "Linux" or instructions is None:
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
    """The library in the cache folder, built there if it is missing or cannot be loaded; where nothing can be written, it
    is built for this process alone."""
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
        logger.warning(
            "each process builds its kernels for itself; set TANDEM_CACHE to a folder that can be written: %s", error
        )
        with tempfile.TemporaryDirectory() as own:
            return opened(_built(source, command, Path(own), timeout_s))  # what is loaded stays, though its file goes
    with folder:
        built = _built(source, command, Path(folder.name), timeout_s)
        built.replace(path)  # at once: processes that build together never load half a file
    return opened(path)


def _built(source: Path, command: list[str], folder: Path, timeout_s: float) -> Path:
    made = folder / "kernels.so"
    print(f"compiling {source.name}, once for this machine (up to a minute) …", file=sys.stderr, flush=True)
    command = [*command, f"-I{_HEADER.parent}", "-o", str(made), str(source)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as compiling:
        try:
            out, err = compiling.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(compiling.pid, signal.SIGKILL)  # also the programs that the compiler has started
            raise
    if compiling.returncode:
        raise subprocess.CalledProcessError(compiling.returncode, command, out, err)
    return made
