"""Time of generation by the embedded engine, and of delivering weights to it."""

from tandem.models.shape import BYTES
from tandem.planning.cost import ATTENTION, HASHES, MEMORY, OPERATIONS, PRODUCTS, RANKS, Cost, total
from tandem.planning.job import Generator, Job
from tandem.planning.layers import LAYER_OPERATIONS, decode_operations
from tandem.planning.machine import Machine
from tandem.planning.memory import delivered_bytes, engine_weights, kv_tokens


def prefill(job: Job, generator: Generator, machine: Machine) -> tuple[Cost, float]:
    """The prompts of one step, each computed once, and how many tokens they are, in one engine."""
    shape, prompt = generator.shape, job.lengths.prompt
    prompts = -(-job.groups // generator.engines)
    tokens = prompts * prompt
    rows = max(1, min(tokens, generator.prefill_chunk))
    products = shape.layers * machine.product_s(generator.dtype, rows, shape.matrices, packed=True) * tokens / rows
    heads = machine.product_s(generator.dtype, max(1, prompts), shape.embedding, packed=True)
    attention = shape.layers * 4 * (prompt * prompt / 2) * shape.query * prompts / machine.attention[generator.dtype]
    moved = shape.layers * BYTES[generator.dtype] * (20 * shape.hidden + 6 * shape.intermediate) * tokens
    operations = LAYER_OPERATIONS["prefill"] + 8 * prompts / max(1.0, tokens / rows)
    return Cost(
        (
            (PRODUCTS, products + heads),
            (ATTENTION, attention),
            (MEMORY, moved / machine.elementwise),
            (OPERATIONS, shape.layers * operations * machine.operation_s * tokens / rows),
        )
    ), float(tokens)


def decode(job: Job, generator: Generator, machine: Machine) -> tuple[Cost, float]:
    """All completions of one step, token by token, and how many tokens they are, in one engine."""
    shape, size = generator.shape, BYTES[generator.dtype]
    samples = -(-job.groups * job.generated // generator.engines)
    running = min(kv_tokens(job, generator)[0], samples)
    tokens = float(samples * job.lengths.completion)
    steps = max(float(job.lengths.completion), tokens / running)
    rows = max(1, round(tokens / steps))
    products = shape.layers * machine.product_s(generator.dtype, rows, shape.matrices, packed=True)
    products += machine.product_s(generator.dtype, rows, shape.embedding, packed=True)
    shared = job.generated > 1
    keys = rows * job.lengths.completion / 2 + job.lengths.prompt * rows / (job.generated if shared else 1)
    attention = size * 2 * shape.key * keys * shape.layers / machine.decode_attention[generator.dtype]
    logits = float(rows) * shape.vocab
    moved = logits / machine.softmax + logits * 12 / machine.stream
    moved += shape.layers * rows * size * (20 * shape.hidden + 6 * shape.intermediate) / machine.elementwise
    operations = decode_operations(shape.layers, shared=shared)
    one = Cost(
        (
            (PRODUCTS, products),
            (ATTENTION, attention),
            (MEMORY, moved),
            (OPERATIONS, operations * (machine.engine_operation_s or machine.operation_s)),
        )
    )
    return one * steps, tokens


def publishing(job: Job, generator: Generator, machine: Machine) -> Cost:
    """Streaming, hashing at both ends, and laying out anew; see `WeightPublisher`. Of an adapter the engine reads the base
    again and merges."""
    shape, sent = generator.shape, delivered_bytes(generator)
    hashing = sent / (2 * machine.digest) + sent / machine.digest  # two threads beside the cast; then tensor by tensor
    if machine.kind == "cpu":
        hashing = sent / (min(2, machine.threads) * machine.digest) + sent / machine.digest
    read = (2 * sent + shape.stored * shape.parameters()) if generator.adapter else 4 * shape.parameters() + 2 * sent
    moved = read + 3 * engine_weights(generator, machine)
    parts = [(HASHES, hashing), (MEMORY, moved / machine.stream)]
    adapters = job.actor.adapters
    if generator.adapter and adapters is not None:  # in float32, whatever the engine computes in
        merged = shape.layers * shape.matrices
        parts.append((PRODUCTS, 2 * merged * adapters.rank / machine.rate("float32", adapters.rank)))
        parts.append((MEMORY, 16 * merged / machine.stream))
    if machine.kind == "gpu":
        parts.append((RANKS, 2 * sent / machine.host_link))  # to the hashing threads and back
    return total([Cost(tuple(parts))])
