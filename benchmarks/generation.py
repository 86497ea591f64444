"""Tokens a second of the embedded engine, prefill included, beside a running vLLM server if one is named.

    python benchmarks/generation.py --gsm8k ../shared/data/gsm8k [--vllm-url http://127.0.0.1:8000]

Prompts are GSM8K questions through the model's chat template; every request makes exactly the same number of tokens. Both
systems get the same token ids, in turn, in one run, so their ratio does not depend on the machine's mood. Prints a table,
and one JSON object as the last line.
"""

import argparse
import json
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tandem.api.requests import LLMRequest, NoiseKey
from tandem.api.weights import WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference.core import EngineCore
from tandem.models.allocator import keep_freed_memory
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer

Prompts = list[tuple[int, ...]]


def gsm8k_prompts(folder: Path, tokenizer, count: int) -> Prompts:
    """Token ids of the first questions, as a chat model sees them."""
    lines = (folder / "train.jsonl").read_text().splitlines()[:count]
    prompts = []
    for line in lines:
        messages = [{"role": "user", "content": json.loads(line)["question"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
        prompts.append(tuple(ids))
    return prompts


class Ours:
    """The embedded engine, driven in this thread."""

    name = "tandem"

    def __init__(self, folder: Path, dtype: torch.dtype):
        self.core = EngineCore(folder, EmbeddedEngineConfig(), dtype, torch.device("cpu"), WeightVersion(0))
        self._number = 0

    def generate(self, prompts: Prompts, samples: int, new_tokens: int) -> int:
        """Runs all requests; returns the tokens made."""
        gconfig = GenerationConfig(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
        for group, prompt in enumerate(prompts):
            for sample in range(samples):
                self._number += 1
                self.core.add(self._number, LLMRequest(prompt, gconfig, NoiseKey(self._number, 0, group, sample)))
        made = 0
        while self.core.has_work:
            made += sum(len(response.output_ids) for _, response in self.core.step())
        return made


class VLLM:
    """A vLLM server started with ``--enable-scale-out``; all requests at once, groups by ``n``."""

    name = "vllm"

    def __init__(self, url: str):
        self._url = url.rstrip("/") + "/inference/v1/generate"

    def generate(self, prompts: Prompts, samples: int, new_tokens: int) -> int:
        """Runs all requests; returns the tokens made."""
        parameters = {"temperature": 1.0, "max_tokens": new_tokens, "ignore_eos": True, "logprobs": 0, "n": samples}

        def one(prompt: tuple[int, ...]) -> int:
            body = json.dumps({"token_ids": list(prompt), "sampling_params": parameters}).encode()
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=600) as answer:
                return sum(len(choice["token_ids"]) for choice in json.load(answer)["choices"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            return sum(pool.map(one, prompts))


def split_of(before: dict[str, float], after: dict[str, float], repeats: int) -> dict[str, float]:
    """Seconds of one repeat that the engine spent on prompts and on decode steps, on average."""
    return {name: (after[name] - before[name]) / repeats for name in ("prefill_s", "decode_s")}


def measure(engines, prompts: Prompts, samples: int, new_tokens: int, repeats: int) -> dict[str, float]:
    """Median tokens a second of each engine, the engines taking turns; each repeat has prompts of its own."""
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    count = len(prompts) // repeats
    for repeat in range(repeats):
        some = prompts[repeat * count : (repeat + 1) * count]
        for engine in engines:
            began = time.perf_counter()
            made = engine.generate(some, samples, new_tokens)
            seconds = time.perf_counter() - began
            if made != len(some) * samples * new_tokens:
                raise SystemExit(f"{engine.name} made {made} tokens instead of {len(some) * samples * new_tokens}")
            rates[engine.name].append(made / seconds)
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with train.jsonl")
    parser.add_argument("--vllm-url", help="running server of the same model")
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--group", type=int, default=8, help="samples of one prompt in the grouped rows")
    parser.add_argument("--only", choices=["distinct", "groups"])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    folder = resolve(arguments.model)
    kinds = {"distinct": 1, "groups": arguments.group}
    if arguments.only:
        kinds = {arguments.only: kinds[arguments.only]}
    prompts = gsm8k_prompts(arguments.gsm8k, load_tokenizer(folder), max(arguments.requests) * arguments.repeats + 8)
    print(f"prompts: {statistics.mean(map(len, prompts)):.0f} tokens on average, {max(map(len, prompts))} at most")
    engines = [Ours(folder, getattr(torch, arguments.dtype))] + ([VLLM(arguments.vllm_url)] if arguments.vllm_url else [])
    for engine in engines:
        engine.generate(prompts[-8:], 2, 8)  # warm up
    rows = []
    for kind, samples in kinds.items():
        for requests in arguments.requests:
            some = prompts[: requests // samples * arguments.repeats]
            before = engines[0].core.statistics()
            rates = measure(engines, some, samples, arguments.new_tokens, arguments.repeats)
            split = split_of(before, engines[0].core.statistics(), arguments.repeats)
            ratio = rates["tandem"] / rates["vllm"] if "vllm" in rates else None
            rows.append({"kind": kind, "requests": requests, **rates, "ratio": ratio, **split})
            words = "   ".join(f"{name} {rate:7.1f} tok/s" for name, rate in rates.items())
            words += f"   {ratio:.2f}x" if ratio else ""
            parts = f"prefill {split['prefill_s']:.2f} s, decode {split['decode_s']:.2f} s"
            print(f"{kind:>9} {requests:4d}   {words}   ({parts})", flush=True)
    print(
        json.dumps(
            {"dtype": arguments.dtype, "threads": arguments.threads, "new_tokens": arguments.new_tokens, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
