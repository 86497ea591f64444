"""In place of SGLang's package of CUDA kernels, for a machine without a GPU: torch's own attention calls one of them."""

__version__ = "0.4.10"


def copy_all_layer_kv_cache_cpu(k_caches, v_caches, destination, source):
    """Copies cache entries from one place to another, in every layer."""
    for layer in (*k_caches, *v_caches):
        layer[destination] = layer[source]


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*_, **__):
        raise RuntimeError(f"sgl_kernel.{name} needs a GPU; only torch's own attention (torch_native) works without one")

    return unavailable
