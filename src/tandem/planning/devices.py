"""Machines that are not here, from data sheets. A rate is the data sheet's peak times a share that somebody measured.

The shares: dense bfloat16 products reach `MATMUL` of the peak at their best (where a measurement of the kind is published
it stands in the table), and training reaches `IN_TRAINING` of that. `IN_TRAINING` was fitted to one published row, and other
rows are predicted with it, see docs/planning.md.
"""

import math
from dataclasses import dataclass

from tandem.config.errors import ConfigError
from tandem.config.nearest import nearest_names
from tandem.planning.machine import Machine

IN_TRAINING = 0.77
"""Share of a device's best matrix product that the shapes of a training step reach. Fitted: Llama 2 13B, FSDP2, 64 A100."""

MATMUL = 0.75
"""Share of the peak that the best matrix product reaches, if nobody published a measurement of the device."""

ATTENTION = 0.5
"""Share of the peak that attention reaches: FlashAttention, forward and backward (arXiv:2307.08691, arXiv:2407.08608: 0.5 to
0.7 forward)."""

BANDWIDTH = 0.8
"""Share of the memory's bandwidth that passes reach which read and write."""

LAUNCH_S = 8e-6
"""An operation of eager torch on a GPU that is otherwise idle. Assumed, not measured."""

DIGEST = 1.4e9
"""Bytes/s of SHA-256 with the processor's own instructions. Assumed for the host."""

HOST_LINK, HOST_STREAM = 25e9, 40e9
"""Bytes/s between a GPU and pinned host memory (PCIe 4 × 16 gives 32e9 at most), and of the optimizer's passes over host
memory, of one GPU's share of it. Assumed."""

CONTEXT_GIB, SLACK = 0.6, 0.2
"""A CUDA context with its libraries, and the caching allocator's holes, see `Machine.slack`. Assumed."""

ACCELERATORS = "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md"
"""Peaks without sparsity of all but the consumer cards, and the best measured products of A100 and H100."""

UPGRADE = "https://github.com/stas00/ml-engineering/blob/master/insights/when-to-upgrade-gpus/README.md"
"""Memory, bandwidth and best measured products of H200 and B200."""

LOCKWOOD = "https://glennklockwood.com/garden/processors/"
"""Memory, bandwidth and NVLink of A100 and H100, after NVIDIA's data sheets."""

H100_SHEET = "https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html"
H100_HBM2E = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
"""The machines of its tables: 96 GB and 2.4 TB/s, held at 500 W; their peak is not known, and taken as the others'."""

H200_MLPERF = (
    "https://github.com/mlcommons/inference_results_v4.1/blob/main/closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json"
)
B200_BANDWIDTH = "https://github.com/pytorch/ao/pull/4002"
B200_LINK = "https://huggingface.co/datasets/devidasmishra/ai-inference-hardware-economics-2026"
L40S_SHEET = "https://www.mullet.se/product.html?product_id=355414"
RTX_4090 = "https://gist.github.com/mikasenghaas/d63ded03f1f0417b1677627119bacc0d"
RTX_FLOAT32 = "https://huggingface.co/datasets/ohdoking/gpu_spec"


@dataclass(frozen=True)
class Device:
    """A line of the table."""

    memory_gb: float
    """Memory that the vendor advertises, in GB: 80 for an 80-GB card. Only the page on planning shows it."""

    memory_gib: float
    """Memory that torch reports (`total_memory`) and plans are made with: the least that was seen, see docs/planning.md."""

    bfloat16_tflops: float
    """Dense peak with float32 accumulation, without sparsity."""

    float32_tflops: float
    bandwidth_gb_s: float
    link_gb_s: float
    """To other devices of the machine, in one direction."""

    sources: tuple[str, ...]
    matmul: float = MATMUL
    """Best measured share of the peak in a bfloat16 product."""


DEVICES: dict[str, Device] = {
    "a100": Device(80, 79.1, 312, 19.5, 2039, 300, (LOCKWOOD + "A100", ACCELERATORS), 0.869),
    "a100-40gb": Device(40, 39.4, 312, 19.5, 1555, 300, (LOCKWOOD + "A100", ACCELERATORS), 0.869),
    "h100": Device(80, 79.1, 989, 67, 3350, 450, (H100_SHEET, LOCKWOOD + "h100", ACCELERATORS), 0.803),
    "h100-hbm2e": Device(96, 94.9, 989, 67, 2400, 450, (H100_HBM2E, H100_SHEET, ACCELERATORS), 0.803),
    "h200": Device(141, 139.7, 989, 67, 4800, 450, (UPGRADE, H200_MLPERF, ACCELERATORS), 0.803),
    "b200": Device(180, 178.3, 2250, 80, 7672, 900, (UPGRADE, B200_BANDWIDTH, B200_LINK), 0.776),
    "l40s": Device(48, 44.3, 362, 91.6, 864, 32, (L40S_SHEET, ACCELERATORS)),
    "rtx4090": Device(24, 23.5, 165.2, 82.6, 1008, 32, (RTX_4090, RTX_FLOAT32)),
}
"""Name → figures. The peaks of the data sheets are halved where they are given with sparsity."""


def device(name: str, count: int = 1) -> Machine:
    """``count`` devices of the table in one machine.

    Raises:
        ConfigError: no such device; tells the nearest name.
    """
    key = name.lower().replace(" ", "").replace("_", "-").removeprefix("nvidia-")
    if key not in DEVICES:
        raise ConfigError(
            f"--device {name} is not in the table; {nearest_names(key, DEVICES)}. Leave it out for this machine"
        )
    row = DEVICES[key]
    product = row.bfloat16_tflops * 1e12 * row.matmul * IN_TRAINING
    single = row.float32_tflops * 1e12 * row.matmul * IN_TRAINING  # without TF32, which torch leaves off
    passes = row.bandwidth_gb_s * 1e9 * BANDWIDTH
    rates = {"bfloat16": ((1, product),), "float32": ((1, single),)}
    peak = row.bfloat16_tflops * 1e12
    return Machine(
        name=f"{key} × {count}",
        kind="gpu",
        count=count,
        memory_gib=row.memory_gib,
        fast_bfloat16=True,
        matmul=rates,  # type: ignore[arg-type]
        packed_matmul=rates,  # type: ignore[arg-type]
        attention={"bfloat16": peak * ATTENTION, "float32": row.float32_tflops * 1e12 * ATTENTION},
        decode_attention={"bfloat16": passes, "float32": passes},
        elementwise=passes,
        stream=passes,
        softmax=passes / 12,
        operation_s=LAUNCH_S,
        digest=DIGEST,
        link=row.link_gb_s * 1e9 * BANDWIDTH if count > 1 else math.inf,
        host_link=HOST_LINK,
        host_stream=HOST_STREAM,
        process_gib=CONTEXT_GIB,
        slack=SLACK,
        threads=16,
        overlaps=True,
        sources=row.sources,
    )
