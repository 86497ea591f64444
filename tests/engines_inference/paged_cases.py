"""Runs in the environment of scripts/triton_env.sh: the decode kernel in Triton's interpreter, and what its compiler makes.

    TRITON_INTERPRET=1 envs/triton/bin/python -m tests.engines_inference.paged_cases cases NUMBER OF
    TRITON_INTERPRET=1 envs/triton/bin/python -m tests.engines_inference.paged_cases engine
    envs/triton/bin/python -m tests.engines_inference.paged_cases compile

Prints JSON. `cases` computes those of 200 whose number is NUMBER modulo OF.
"""

import json
import random
import re
import sys
import tempfile
from pathlib import Path

import torch
import triton

from tandem.engines.inference import paged_kernel, passes
from tandem.engines.inference.attention import Kernel, PagedDecode
from tandem.engines.inference.kv_cache import KVCache
from tests import paged_reference

CPU = torch.device("cpu")
LONG = 1000


def case(number):
    """Sizes and lengths of a case: three of ten have more than 1,000 keys."""
    choose = random.Random(number)
    long = number % 10 < 3
    rows = 1 if long else choose.choice((1, 1, 2, 4))
    dtype = torch.bfloat16 if number % 2 else torch.float32
    group = choose.choice((1, 2, 3, 4, 6, 7, 8, 12, 16))
    dim = choose.choice((64, 64, 80, 96, 128, 128, 256) if not long else (64, 64, 80, 128))
    kv_heads = 1 if long else choose.choice((1, 2))
    lengths = [choose.randint(LONG + 1, choose.choice((1100, 1200, 1500, 4000))) if long else choose.randint(1, 600)]
    lengths += [choose.choice((1, 2, 33, 257, choose.randint(1, 300))) for _ in range(rows - 1)]
    if number == 0:
        lengths = [5000]
    starts = [choose.choice((0, 0, choose.randint(0, length - 1))) for length in lengths]
    window = choose.choice((None, None, None, 128, 700))
    softcap = choose.choice((None, None, 30.0))
    return dtype, group, kv_heads, dim, lengths, starts, window, softcap, choose


def planned(number):
    """The plan of a case over a cache of random numbers, in which rows lie in any order, and the new tokens."""
    dtype, group, kv_heads, dim, lengths, starts, window, softcap, choose = case(number)
    torch.manual_seed(number)
    cache = KVCache(1, kv_heads, dim, dtype, CPU, 1.0)
    wanted = [("prompt", i, starts[i]) for i in range(len(lengths)) if starts[i]]
    wanted += [("whole", i, lengths[i] - starts[i]) for i in range(len(lengths))]
    wanted += [("whole", None, choose.randint(1, 300)) for _ in range(3)]
    choose.shuffle(wanted)
    rows = {(pool, i): cache.allocate(pool, cache.capacity_for(tokens)) for pool, i, tokens in wanted}
    for slab in cache.slabs.values():
        for tensor in (*slab.keys, *slab.values):
            tensor.normal_()
    kernel = Kernel(kv_heads * group, kv_heads, dim, dim**-0.5, softcap, dtype, CPU)
    own = [length - start for length, start in zip(lengths, starts, strict=True)]
    numbers = range(len(lengths))
    plan = PagedDecode(kernel, [rows["whole", i] for i in numbers], [rows.get(("prompt", i)) for i in numbers], own, starts)
    new = torch.randn(len(lengths), kv_heads * (group + 2), dim).mul(choose.choice((1, 3))).to(dtype)
    return plan, window, new.split([kv_heads * group, kv_heads, kv_heads], 1)


def round_to_nearest():
    """The interpreter cuts digits off where a GPU rounds float32 to the nearest bfloat16."""
    interpreter = triton.runtime.interpreter
    cast = interpreter.InterpreterBuilder.cast_impl

    def rounded(this, source, wanted):
        if (source.dtype.scalar, wanted.scalar) != (triton.language.float32, triton.language.bfloat16):
            return cast(this, source, wanted)
        numbers = torch.tensor(source.data).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(numbers, wanted.scalar)

    interpreter.InterpreterBuilder.cast_impl = rounded


class Loads:
    """Counts the bytes that the kernels load, masked lanes left out."""

    def __init__(self):
        self.bytes = 0
        builder = triton.runtime.interpreter.InterpreterBuilder
        load = builder.create_masked_load

        def counted(this, pointers, mask, *rest):
            found = load(this, pointers, mask, *rest)
            self.bytes += int(mask.data.sum()) * found.data.itemsize
            return found

        builder.create_masked_load = counted


def run_case(number, loads):
    """Errors of the kernel and of flash attention in bfloat16, and bytes."""
    plan, window, new = planned(number)
    seen = []

    def recorded(*args):
        seen.append(args)
        return attend(*args)

    attend, paged_kernel.attend = paged_kernel.attend, recorded
    loads.bytes = 0
    try:
        out = plan(0, window, *new)
    finally:
        paged_kernel.attend = attend
    loaded, (args,) = loads.bytes, seen
    written, exact = paged_reference.written(*args), paged_reference.exact(*args)
    uncapped = (*args[:-1], None)
    flash = (paged_reference.flash(*args).double() - paged_reference.exact(*uncapped)).abs().max().item()
    lengths = (args[3][3] + args[3][7]).tolist()
    keys = sum(len(k) * k.shape[1] for _, k, _, _ in paged_reference.visible(*args[:2], *args[3:5], window, exact))
    return {
        "dtype": str(new[0].dtype).removeprefix("torch."),
        "keys": max(lengths),
        "error": (out.view(exact.shape).double() - exact).abs().max().item(),
        "flash": flash,
        "capped": args[-1] is not None,
        "largest": exact.abs().max().item(),
        "written": written,
        "loaded": loaded,
        "attended": 2 * keys * new[0].dtype.itemsize,
    }


def engine():
    """Tokens and log-probabilities of the engine with and without the kernel, by kind of model."""
    from tandem.config.rollout import GenerationConfig  # noqa: PLC0415
    from tests.engines_inference.test_core_equal import make_core  # noqa: PLC0415
    from tests.engines_inference.test_core_on_gpu import requests  # noqa: PLC0415
    from tests.tiny import tiny_model_folder  # noqa: PLC0415

    ordinary, told = passes.DecodePlan, {}
    passes.kernels = lambda _: None  # as on a GPU: nothing is compiled for the CPU
    for kind in ("qwen3", "gemma2"):  # without windows and soft-caps, and with both
        answers = []
        for plan in (ordinary, lambda *given: PagedDecode(*given[:-1])):
            passes.DecodePlan = plan
            with tempfile.TemporaryDirectory() as folder:
                core, found = make_core(tiny_model_folder(Path(folder), kind)), {}
                for number, request in enumerate(requests([GenerationConfig(max_new_tokens=12)] * 2)):
                    core.add(number, request)
                while core.has_work:
                    found.update(core.step())
            answers.append([(one.output_ids, one.logprobs) for _, one in sorted(found.items())])
        told[kind] = answers
    return told


def compiled():
    """The splitting kernel as it is compiled for Ampere and Hopper: shared memory, and its instructions that load."""
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    told = []
    for capability, dtype, item, dim, group in ((80, "bf16", 2, 256, 8), (80, "fp32", 4, 64, 1), (90, "bf16", 2, 128, 6)):
        for function in paged_kernel.kernels():
            shape, tile = paged_kernel.sizes(2 * group, 2, dim, item)
            fixed = shape | tile | {"CAPPED": True, "PRECISION": "ieee" if item == 4 else "tf32"}
            tensors = dict.fromkeys(("queries", "new_keys", "new_values", "out"), f"*{dtype}")
            tensors |= {"table": "*i64", "addresses": "*i64", "parts": "*fp32", "sums": "*fp32"}
            others = tensors | {"scale": "fp32", "softcap": "fp32"}
            names = function.arg_names
            signature = {name: "constexpr" if name in fixed else others.get(name, "i32") for name in names}
            aligned = [i for i, name in enumerate(names) if name in tensors or name.endswith("stride")]
            source = ASTSource(
                function,
                signature,
                {(names.index(name),): value for name, value in fixed.items() if name in names},
                {(i,): [["tt.divisibility", 16]] for i in aligned},
            )
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            wide = len(re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", made.asm["ptx"]))
            told.append({"name": function.__name__, "shared": made.metadata.shared, "wide": wide})
    return told


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["cases", first, step]:
            round_to_nearest()
            counted = Loads()
            answer = [run_case(number, counted) for number in range(int(first), 200, int(step))]
        case ["engine"]:
            answer = engine()
        case _:
            answer = compiled()
    json.dump(answer, sys.stdout)
