"""Compiled kernels for CPUs (`kernels.cpp`): everything of a step but the products.

There are two libraries: one computes with bfloat16 numbers, which needs AVX-512 with bfloat16 dot products, the other with
float32 numbers, which needs AVX2. They are built once with the machine's own compiler into the cache folder. Without a
compiler or the instructions the engine computes the same with torch's operators, which stay the reference.
``TANDEM_KERNELS=0`` turns the kernels off.
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
from pathlib import Path

import torch

from tandem.config.errors import ConfigError
from tandem.models.catalog import cache_folder

logger = logging.getLogger("tandem.engine")

_SOURCE = Path(__file__).with_name("kernels.cpp")
# Named one by one and not -march=native, so that an object in a shared cache folder runs on every CPU that may load it.
_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-w", "-mfma", "-mf16c"]
_AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq")]

HEAD_DIMS = (32, 64, 96, 128, 256)
"""Those that attention is compiled for."""


class AttentionPlan(ctypes.Structure):
    """``AttentionPlan`` of `kernels.cpp`: which tokens attend to which rows."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "tokens", "tiles")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("token", "own_slab", "own_row", "own_length")),
        *((name, ctypes.c_void_p) for name in ("prompt_slab", "prompt_row", "prompt_length", "tile", "capacity")),
    ]


class Layer(ctypes.Structure):
    """``Layer`` of `kernels.cpp`: the tensors of one layer."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "keys", "values", "position")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "query_norm", "key_norm")),
        ("eps", ctypes.c_float),
        ("window", ctypes.c_int64),
    ]


class Kernels:
    """Calls into the library. Tensors are contiguous, on the CPU and of ``dtype`` unless said otherwise."""

    def __init__(self, path: Path, dtype: torch.dtype):
        self.dtype = dtype
        # torch has loaded its OpenMP before, under the same name, so both share one pool of threads.
        library = ctypes.CDLL(str(path))
        pointer, number, real, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        self._norm, self._gate = library.rms_norm, library.silu_gate
        self._draw, self._attend = library.draw, library.attend
        self._norm.argtypes = [pointer, pointer, pointer, number, number, real, threads]
        self._gate.argtypes = [pointer, pointer, number, number, threads]
        self._draw.argtypes = [pointer] * 8 + [number, number, threads]
        self._attend.argtypes = [ctypes.POINTER(AttentionPlan), ctypes.POINTER(Layer), threads]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``[T, size]``, each row over its root mean square, times ``weight [size]``."""
        out = torch.empty_like(x)
        self._norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), len(x), x.shape[1], eps, torch.get_num_threads())
        return out

    def silu_gate(self, both: torch.Tensor) -> torch.Tensor:
        """``[T, 2 · I]`` (gate, up) → silu(gate) · up, ``[T, I]``."""
        rows, size = len(both), both.shape[1] // 2
        out = both.new_empty(rows, size)
        self._gate(both.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        return out

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        uniforms: torch.Tensor,
        greedy: torch.Tensor | None,
        forbidden: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[B]`` drawn from softmax(logits ``[B, V]`` / temperature) by ``uniforms`` (float64), or the most probable
        where ``greedy`` (bool), and their log-probabilities (float32).

        ``forbidden``: rows ``[F]`` in ascending order, and a token of each that it may not draw."""
        rows, size = logits.shape
        tokens, logprobs = torch.empty(rows, dtype=torch.long), torch.empty(rows)
        given = [logits.data_ptr(), temperatures.data_ptr(), uniforms.data_ptr(), None, None, None]
        if greedy is not None:
            given[3] = greedy.data_ptr()
        if forbidden is not None:
            bans = torch.searchsorted(forbidden[0], torch.arange(rows + 1))
            given[4:] = forbidden[1].data_ptr(), bans.data_ptr()
        self._draw(*given, tokens.data_ptr(), logprobs.data_ptr(), rows, size, torch.get_num_threads())
        return tokens, logprobs

    def attend(self, plan: AttentionPlan, layer: Layer) -> None:
        """Rotates queries and keys, writes keys and values to the cache, and attends; ``layer.out`` is filled."""
        if self._attend(plan, layer, torch.get_num_threads()):
            raise ValueError(f"attention is compiled for head dimensions {HEAD_DIMS}, got {plan.dim}")


def _instructions(dtype: torch.dtype) -> list[str] | None:
    """The compiler's flags for kernels for ``dtype``: instructions, and the kind of numbers. None: this CPU lacks some."""
    if dtype == torch.bfloat16:
        return [*_AVX512, "-mavx512bf16", "-DBFLOAT16"] if torch.cpu._is_avx512_bf16_supported() else None
    if dtype != torch.float32:
        return None
    return _AVX512 if torch.cpu._is_avx512_supported() else ["-mavx2"] if torch.cpu._is_avx2_supported() else None


@functools.cache
def kernels(dtype: torch.dtype, build_timeout_s: float = 120) -> Kernels | None:
    """The kernels for numbers of ``dtype``, built now if nobody has built them yet; None, and one line in the log, where
    that is impossible.

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
        logger.warning("no C++ compiler: generation computes with torch's operators, a third slower; install g++")
        return None
    try:
        return _loaded([*compiler, *_FLAGS, *instructions], dtype, build_timeout_s)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or str(error)
        logger.warning(
            "generation computes with torch's operators, a third slower: %s (the compiler, CXX or g++) did not build its "
            "kernels: %s", shlex.join(compiler), str(words).strip()[-500:],
        )  # fmt: skip
        return None


def _loaded(command: list[str], dtype: torch.dtype, timeout_s: float) -> Kernels:
    """The kernels of the cache folder, built there if they are missing or cannot be loaded; where nothing can be written,
    built for this process alone."""
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    path = cache_folder() / "kernels" / f"{key}.so"
    if path.exists():
        try:
            return Kernels(path, dtype)
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
            return Kernels(_built(command, Path(own), timeout_s), dtype)  # what is loaded stays, though its file goes
    with folder:
        _built(command, Path(folder.name), timeout_s).replace(
            path
        )  # at once: processes that build together never load half a file
    return Kernels(path, dtype)


def _built(command: list[str], folder: Path, timeout_s: float) -> Path:
    made = folder / "kernels.so"
    print("compiling the kernels of generation, once for this machine (up to a minute) …", file=sys.stderr, flush=True)
    command = [*command, "-o", str(made), str(_SOURCE)]
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
