"""Packed training against padded Hugging Face: forward and backward of SmolLM2-135M on two threads.

Two workloads: equal lengths (8 × 256 tokens, where padding costs nothing) and rows as long as GSM8K's questions with
answers (where it does). Both sides compute the log-probability of every token and the gradient of their mean; Hugging Face
as its users write it: right-padded rows, SDPA attention, logits of the whole batch. The sides alternate in one process, and
what counts is the ratio of medians. Also printed: which share of the machine's own rate of matrix products, measured in the
same run, the packed step reaches (6 FLOP a weight and token; what is computed twice counts once).

    python benchmarks/packed_training.py --gsm8k DATA/gsm8k [--dtype bfloat16] [--repeats 5]
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.models.allocator import keep_freed_memory
from tandem.models.catalog import resolve
from tandem.models.hardware import resolve_dtype
from tandem.models.load import load_causal_lm
from tandem.models.packed import PackedCausalLM


def padded_step(model: torch.nn.Module, rows: list[torch.Tensor]) -> float:
    """Mean negative log-probability over the tokens of ``rows``, its gradient left in the parameters."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
    loss = -(logprobs * mask[:, 1:]).sum() / mask[:, 1:].sum()
    loss.backward()
    return loss.item()


def packed_step(model: PackedCausalLM, rows: list[torch.Tensor]) -> float:
    """The same, packed; neighbours in length together, as the training engine does it."""
    rows = sorted(rows, key=len)
    cu_seqlens = torch.tensor([0, *map(len, rows)]).cumsum(0)
    ids = torch.cat(rows)
    layout = model.lay_out(ids, cu_seqlens, torch.ones(len(ids), dtype=torch.bool), torch.ones(len(rows)))
    logprobs = model(layout).logprobs
    loss = -logprobs.sum() / (len(ids) - len(rows))
    loss.backward()
    return loss.item()


def gsm8k_rows(folder: Path, tokenizer, count: int) -> list[torch.Tensor]:
    """Question and answer of the first rows, as token ids."""
    file = next(iter(sorted(folder.glob("**/*train*.jsonl"))), None)
    if file is None:
        raise SystemExit(f"no *train*.jsonl under {folder}")
    rows = [json.loads(line) for line in file.read_text().splitlines()[:count]]
    return [torch.tensor(tokenizer(row["question"] + "\n" + row["answer"])["input_ids"]) for row in rows]


def product_rate(dtype: torch.dtype, rounds: int = 30) -> float:
    """FLOP a second of the machine: the median of products of 2,048 rows with an MLP's matrix of the model."""
    x, weight = torch.randn(2048, 576).to(dtype), torch.randn(3072, 576).to(dtype)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        seconds.append(time.perf_counter() - start)
    return 2 * x.numel() * len(weight) / statistics.median(seconds)


def compare(name: str, sides: dict, rows: list[torch.Tensor], repeats: int) -> None:
    """Prints the medians of both sides, their ratio and the share; the first round only warms up."""
    tokens, seconds, losses, rates = sum(map(len, rows)), {side: [] for side in sides}, {}, []
    for round_index in range(repeats + 1):
        for side, (step, model) in sides.items():
            model.zero_grad()
            start = time.perf_counter()
            losses[side] = step(model, rows)
            if round_index:
                seconds[side].append(time.perf_counter() - start)
        rates.append(product_rate(next(model.parameters()).dtype))
    median = {side: statistics.median(times) for side, times in seconds.items()}
    speeds = ", ".join(f"{side} {tokens / median[side]:.0f} tok/s" for side in sides)
    print(
        f"{name}: {len(rows)} rows, {tokens} tokens: {speeds}; packed / padded {median['padded'] / median['packed']:.2f}",
        flush=True,
    )
    rate = statistics.median(rates)
    weights = sum(parameter.numel() for parameter in sides["packed"][1].parameters())
    reached = 6 * weights * tokens / median["packed"]
    print(f"  packed: {reached / 1e9:.0f} of {rate / 1e9:.0f} GFLOP/s, {reached / rate:.0%}", flush=True)
    print(f"  losses: {', '.join(f'{side} {loss:.5f}' for side, loss in losses.items())}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gsm8k", type=Path, help="folder with GSM8K as *train*.jsonl; without it only equal lengths are run"
    )
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8, help="rows in a batch")
    arguments = parser.parse_args()

    torch.set_num_threads(2)
    keep_freed_memory()
    dtype = resolve_dtype(arguments.dtype, "cpu")
    folder = resolve("smollm2-135m")
    padded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    sides = {"padded": (padded_step, padded), "packed": (packed_step, load_causal_lm(folder, dtype, chunk_tokens=512))}
    print(
        f"{dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}, median of {arguments.repeats}", flush=True
    )
    generator = torch.Generator().manual_seed(0)
    equal = [torch.randint(0, padded.config.vocab_size, (256,), generator=generator) for _ in range(arguments.rows)]
    compare("equal lengths", sides, equal, arguments.repeats)
    if arguments.gsm8k is not None:
        rows = gsm8k_rows(arguments.gsm8k, AutoTokenizer.from_pretrained(folder), arguments.rows)
        compare("GSM8K's lengths", sides, rows, arguments.repeats)


if __name__ == "__main__":
    main()
