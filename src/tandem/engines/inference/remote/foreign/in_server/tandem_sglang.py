"""Starts SGLang with a lock on every route: ``python tandem_sglang.py OPTION…``, with the options of `sglang.launch_server`.

It runs in SGLang's environment, where Tandem is not installed. SGLang's processes find `sglang.launch_server` as their main
module, as if it had been started directly. The additional option ``--memory-share`` is the share of a GPU's memory for
weights and cache. SGLang's own ``--mem-fraction-static`` is a share of the memory that is free at its start, which varies
beside a trainer.
"""

import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence

MEMORY_SHARE = "--memory-share"

_ASK = "import torch; print(*min(torch.cuda.mem_get_info(one) for one in range(torch.cuda.device_count())))"


def memory_now() -> tuple[int, int]:
    """Returns the free and total bytes of the GPU with the least free memory. A separate process reads them, because CUDA
    occupies memory in every process that asks, as long as that process lives."""
    free, total = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True).stdout.split()
    return int(free), int(total)


def own_words(words: Sequence[str], memory: Callable[[], tuple[int, int]] = memory_now) -> list[str]:
    """Returns the arguments for SGLang: the share of all memory becomes the share of free memory with the same number of
    bytes. Exits if that much memory is not free."""
    if MEMORY_SHARE not in words:
        return list(words)
    at = words.index(MEMORY_SHARE)
    (free, total), share = memory(), float(words[at + 1])
    if share * total >= free:
        wanted, available, missing = (f"{size / 2**30:.4g} GiB" for size in (share * total, free, share * total - free))
        sys.exit(
            f"{share:.0%} of the GPU's memory are {wanted}, and {available} are free: {missing} are missing, which other "
            "processes hold. Set rollout.fleet.memory_share or actor.max_tokens_per_micro_batch to less"
        )
    return [*words[:at], "--mem-fraction-static", f"{share * total / free:.4f}", *words[at + 2 :]]


if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import app
    from tandem_key import RequireKey

    sys.argv[1:] = own_words(sys.argv[1:])
    app.add_middleware(RequireKey)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
