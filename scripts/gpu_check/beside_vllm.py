"""Seconds of vLLM's decode step, in the environment that has it: `beside_vllm.py FOLDER ROWS LENGTH…` prints a JSON object.

Imports vLLM and nothing of Tandem. Prompts are random tokens, as in speeds.py; a step is what 64 new tokens take longer than
one, by 63.
"""

import json
import random
import sys
import time

from vllm import LLM, SamplingParams

NEW = 64


def main() -> None:
    """Each length once for warmth, then three times; the median counts."""
    folder, rows, *lengths = sys.argv[1:]
    longest = max(map(int, lengths))
    llm = LLM(folder, dtype="bfloat16", enable_prefix_caching=False, max_model_len=longest + NEW, max_num_seqs=int(rows))
    draw, steps = random.Random(0), {}
    for length in map(int, lengths):
        seconds = []
        for _ in range(4):
            prompts = [{"prompt_token_ids": [draw.randrange(3, 304) for _ in range(length)]} for _ in range(int(rows))]
            took = []
            for new in (1, NEW):
                sampling = SamplingParams(max_tokens=new, min_tokens=new, ignore_eos=True, temperature=1.0)
                began = time.perf_counter()
                llm.generate(prompts, sampling, use_tqdm=False)
                took.append(time.perf_counter() - began)
            seconds.append((took[1] - took[0]) / (NEW - 1))
        steps[length] = sorted(seconds[1:])[1]
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
