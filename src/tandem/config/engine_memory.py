"""The cache and the prefill of the embedded engine, where the configuration leaves them to the device."""

from tandem.config.rollout import EmbeddedEngineConfig

CACHE_GIB = 2.0
"""Cache on a CPU, on a GPU of which nobody said how much the engine may take, and the least on any other."""

CPU_CHUNK, GPU_CHUNK = 1024, 8192
PLACES = 128
SERVER_PLACES = 1024
"""Of a vLLM server on a large GPU."""


def cache_gib(
    engine: EmbeddedEngineConfig,
    device: str,
    *,
    memory_gib: float | None = None,
    share: float = 0.0,
    weights_gib: float = 0.0,
) -> float:
    """`kv_cache_gib`, or the default for the device.

    On a GPU weights and cache together get ``share`` of its memory (`share_of`). Weights count twice, because new ones
    arrive beside the old ones. The memory is all of the device's and not what happens to be free, so that the planner knows
    the same number, and a resumed run has the same settings.

    Args:
        engine: settings of one engine.
        device: ``cpu``; anything else is a GPU.
        memory_gib: all memory of the device, or the part that the run may take; None if the engine has no share of it.
        share: of it, for this engine.
        weights_gib: one copy of its weights.
    """
    if engine.kv_cache_gib is not None:
        return engine.kv_cache_gib
    if device == "cpu" or memory_gib is None:
        return CACHE_GIB
    return max(CACHE_GIB, share * memory_gib - 2 * weights_gib)


def chunk_tokens(engine: EmbeddedEngineConfig, device: str) -> int:
    """`prefill_chunk_tokens`, or the default for the device: a GPU needs more of them to be busy."""
    return engine.prefill_chunk_tokens or (CPU_CHUNK if device == "cpu" else GPU_CHUNK)


def places(engine: EmbeddedEngineConfig) -> int:
    """`max_running`, or the default of the embedded engine."""
    return engine.max_running or PLACES
