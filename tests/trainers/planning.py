"""A machine with nothing on it and a model whose sizes can be worked out by hand, for the tests of `tandem plan`."""

from dataclasses import replace

from tandem.config.train_engine import Layout, TrainEngineConfig, parse_layout
from tandem.models.shape import Adapters, Shape, engine_bytes
from tandem.planning.job import Generator, Job, Lengths
from tandem.planning.machine import Machine
from tandem.planning.planned_model import PlannedModel

SMOLLM2 = Shape("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, tied=True)
LLAMA_8B = Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 8192)
HAND = Shape("llama", layers=2, hidden=10, intermediate=30, heads=2, kv_heads=1, head_dim=4, vocab=100, context=64)
"""A layer: queries 8, keys 4, so 10 · (2·8 + 2·4 + 3·30) = 1140 and two norms of 10: 1160. Embedding and head: 1000."""


def round_machine(**changes) -> Machine:
    """A CPU of 16 GiB without fast bfloat16, on which nothing but the run takes memory."""
    return replace(Machine(name="round", kind="cpu", memory_gib=16.0, fast_bfloat16=False, sources=("made up",)), **changes)


def held(
    role="actor", shape=HAND, *, ranks=1, backend=None, max_tokens=1000, chunk_tokens=16, checkpointing=False,
    sync_each=False, **changes,
) -> PlannedModel:  # fmt: skip
    """A trained model in float32 on one rank, or spread as ``backend`` says; its layout may be a whole machine's."""
    layout = Layout(data=ranks) if backend is None else parse_layout(backend)
    config = TrainEngineConfig(
        max_tokens_per_micro_batch=max_tokens, logprob_chunk_tokens=chunk_tokens, gradient_checkpointing=checkpointing,
        gradient_sync="micro_batch" if sync_each else None,
    )  # fmt: skip
    usual = {"head": "lm", "dtype": "float32", "trained": True, "layout": layout, "config": config}
    return PlannedModel(role=role, shape=shape, **usual | changes)


def adapters(rank=2, shape=HAND, **changes) -> Adapters:
    """On every matrix of the layers."""
    return Adapters(rank, **{"modules": tuple(shape.linears)} | changes)


def generator(shape=HAND, **changes) -> Generator:
    """A colocated engine in float32."""
    usual = {
        "delivered": "float32", "dtype": "float32", "engines": 1, "own_process": False, "kv_cache_gib": 1.0,
        "max_running": 64, "prefill_chunk": 1024, "sequences": 4,
        "weights": engine_bytes(shape, "float32", cpu=True), "lengths": Lengths(8, 4), "sharing": 2,
    }  # fmt: skip
    return Generator(shape=shape, **usual | changes)


def job(*models, proximal=False, **changes) -> Job:
    """Two prompts of 8 tokens with two completions of 4 each; a critic and each frozen model have a pass of their own."""
    models = models or (held(),)
    passes = [("values" if m.role == "critic" else m.role, m.role) for m in models if not m.trained or m.role == "critic"]
    passes = (*([("proximal", "actor")] if proximal else []), *passes)
    usual = {"lengths": Lengths(8, 4), "groups": 2, "trained": 2, "passes": passes}
    return Job(models=models, **usual | changes)
