"""Machines that are not here: the memory that torch reports of them."""

from dataclasses import dataclass

from tandem.config.errors import ConfigError
from tandem.config.nearest import nearest_names
from tandem.planning.machine import Machine, gpus

ACCELERATORS = "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md"
"""Peaks without sparsity of all but the consumer cards."""

UPGRADE = "https://github.com/stas00/ml-engineering/blob/master/insights/when-to-upgrade-gpus/README.md"
"""Memory of H200 and B200."""

LOCKWOOD = "https://glennklockwood.com/garden/processors/"
"""Memory of A100 and H100, after NVIDIA's data sheets."""

H100_SHEET = "https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html"
H100_HBM2E = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
"""The machines of its tables have 96 GB; their peak is not known, and taken as the others'."""

H200_MLPERF = (
    "https://github.com/mlcommons/inference_results_v4.1/blob/main/closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json"
)
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
    """Dense peak with float32 accumulation, without sparsity: what a share of the peak (MFU) is a share of."""

    float32_tflops: float
    sources: tuple[str, ...]


DEVICES: dict[str, Device] = {
    "a100": Device(80, 79.1, 312, 19.5, (LOCKWOOD + "A100", ACCELERATORS)),
    "a100-40gb": Device(40, 39.4, 312, 19.5, (LOCKWOOD + "A100", ACCELERATORS)),
    "h100": Device(80, 79.1, 989, 67, (H100_SHEET, LOCKWOOD + "h100", ACCELERATORS)),
    "h100-hbm2e": Device(96, 94.9, 989, 67, (H100_HBM2E, H100_SHEET, ACCELERATORS)),
    "h200": Device(141, 139.7, 989, 67, (UPGRADE, H200_MLPERF, ACCELERATORS)),
    "b200": Device(180, 178.3, 2250, 80, (UPGRADE,)),
    "l40s": Device(48, 44.3, 362, 91.6, (L40S_SHEET, ACCELERATORS)),
    "rtx4090": Device(24, 23.5, 165.2, 82.6, (RTX_4090, RTX_FLOAT32)),
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
    return gpus(f"{key} × {count}", row.memory_gib, count, row.sources)
