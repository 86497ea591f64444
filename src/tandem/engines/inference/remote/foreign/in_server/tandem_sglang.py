"""Starts SGLang with a lock on every route: ``python tandem_sglang.py OPTION…``, the options of `sglang.launch_server`.

It runs in SGLang's environment, where there is no Tandem. SGLang's processes find `sglang.launch_server` as their main
module, as if it had been started itself. One option more, ``--memory-share``, is the part of a GPU's memory for weights and
cache. SGLang's own, ``--mem-fraction-static``, is a part of what is free when it starts: beside a trainer that would be a
cache of another size each time.
"""

import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence

MEMORY_SHARE = "--memory-share"

_ASK = "import torch; print(*min(torch.cuda.mem_get_info(one) for one in range(torch.cuda.device_count())))"


def memory_now() -> tuple[int, int]:
    """Free and all bytes of the GPU here that has the least free. A process of its own reads them: CUDA takes memory in each
    that asks, as long as it lives."""
    free, total = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True).stdout.split()
    return int(free), int(total)


def own_words(words: Sequence[str], memory: Callable[[], tuple[int, int]] = memory_now) -> list[str]:
    """The words of the command as SGLang reads them: our share of the memory becomes the share of what is free now that has
    as many bytes. Exits if these are not free."""
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
