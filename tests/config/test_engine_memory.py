"""The cache and the prefill of the embedded engine that the device decides."""

import pytest

from tandem.config.devices import devices_of, share_of
from tandem.config.rollout import EmbeddedEngineConfig, RolloutConfig, cache_gib, chunk_tokens


@pytest.mark.parametrize(
    ("device", "memory_gib", "share", "weights_gib", "cache", "chunk"),
    [
        ("cpu", 64, 0.9, 3, 2.0, 1024),
        ("cuda", 80, 0.9, 3.5, 65.0, 8192),
        ("cuda:1", 80, 0.4, 3.5, 25.0, 8192),
        ("cuda", 8, 0.4, 3.5, 2.0, 8192),  # never less than on a CPU
        ("cuda", None, 0.9, 3.5, 2.0, 8192),  # an engine without a share, such as a judge's
    ],
)
def test_the_device_decides_what_is_left_open(device, memory_gib, share, weights_gib, cache, chunk):
    left_open, said = EmbeddedEngineConfig(), EmbeddedEngineConfig(kv_cache_gib=0.5, prefill_chunk_tokens=24)
    sizes = {"memory_gib": memory_gib, "share": share, "weights_gib": weights_gib}
    assert cache_gib(left_open, device, **sizes) == pytest.approx(cache)
    assert chunk_tokens(left_open, device) == chunk
    assert (cache_gib(said, device, **sizes), chunk_tokens(said, device)) == (0.5, 24)


@pytest.mark.parametrize(
    ("backend", "placement", "ranks", "devices", "share"),
    [
        ("embedded", "colocate", 1, 1, 0.4),
        ("embedded", "colocate", 4, 4, 0.4),
        ("embedded", "colocate", 0, 1, 0.9),  # an evaluation
        ("embedded", "decoupled", 1, 2, 0.9),
        ("embedded", "decoupled", 1, 1, 0.4),  # no device is left for it
        ("embedded:d2", "decoupled", 2, 4, 0.9),
        ("tandem:d2", "colocate", 2, 2, 0.4),
    ],
)
def test_an_engine_beside_training_has_a_smaller_share(backend, placement, ranks, devices, share):
    found = devices_of(RolloutConfig(backend=backend), placement, ranks=ranks, devices=devices)
    assert share_of(found, found.servers[0].name if found.servers else None) == share
