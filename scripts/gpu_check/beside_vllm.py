"""Tokens a second of vLLM, in the environment that has it: `beside_vllm.py FOLDER DTYPE NEW SIZE…` prints a JSON object.

Imports vLLM and nothing of Tandem. Prompts are 64 random tokens, answers are all of one length, as in speeds.py.
"""

import json
import random
import sys
import time

from vllm import LLM, SamplingParams


def main() -> None:
    """Each size once for warmth, then three times; the median counts."""
    folder, dtype, new, *sizes = sys.argv[1:]
    llm = LLM(folder, dtype=dtype, enable_prefix_caching=False, max_model_len=64 + int(new))
    sampling = SamplingParams(max_tokens=int(new), min_tokens=int(new), ignore_eos=True, temperature=1.0)
    vocabulary = llm.get_tokenizer().vocab_size
    draw, rates = random.Random(0), {}
    for size in map(int, sizes):
        seconds = []
        for _ in range(4):
            prompts = [{"prompt_token_ids": [draw.randrange(3, vocabulary) for _ in range(64)]} for _ in range(size)]
            began = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
        rates[size] = size * int(new) / sorted(seconds[1:])[1]
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
