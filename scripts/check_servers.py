"""Real inference servers against the embedded engine and the model itself: same answers, real updates, an honest end.

    python scripts/check_servers.py --model FOLDER --vllm VLLM_ENV/bin/python --sglang SGLANG_ENV/bin/python
    python scripts/check_servers.py … --dtype bfloat16     # how far apart answers are then; no bound is right for that

Starts each server that has an interpreter given, on this machine's cores (``--cpus 1`` for one of them), checks it and
ends it. Prints one line a check; the exit status is the number of checks that failed. Its output is in
docs/servers_measured.md.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.api.failures import InfrastructureFailure
from tandem.api.requests import LLMRequest, LLMResponse, NoiseKey, StopReason
from tandem.api.weights import WeightUpdate, WeightVersion, version_digest
from tandem.config.errors import ConfigError
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.embedded import EmbeddedEngine
from tandem.engines.inference.remote.foreign.completions import ABORT_TIMEOUT_S
from tandem.engines.inference.remote.foreign.server import ForeignServer
from tandem.engines.inference.remote.foreign.sglang import SGLangServer
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tandem.weights.channel import WeightChannel
from tandem.weights.disk import DiskChannel
from tandem.weights.shared_memory import SharedMemoryChannel

TOLERANCE = 1e-4
SETTINGS = EmbeddedEngineConfig(max_running=64, kv_cache_gib=2.0, max_model_len=512)


class Report:
    """Prints what was seen, and counts what was wrong."""

    def __init__(self, exact: bool = True) -> None:
        self.failed, self.exact = 0, exact

    def numbers(self, good: bool, what: str) -> None:
        """A check of numbers, or where they are rounded otherwise on either side only what they are."""
        if self.exact:
            self.line(good, what)
        else:
            print(f"     {what}", flush=True)

    def line(self, good: bool, what: str) -> None:
        """One check."""
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {what}", flush=True)


class Reference:
    """The model itself, by transformers in fp32: scores tokens that somebody else drew."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tied = {"lm_head.weight"} if self.model.config.tie_word_embeddings else set()
        self.own = {name: tensor.clone() for name, tensor in self.model.state_dict().items() if name not in tied}

    @torch.inference_mode()
    def difference(self, answer: LLMResponse, start: int = 0) -> float:
        """Largest gap between the answer's log-probabilities from its token ``start`` on and the model's."""
        ids = torch.tensor([answer.input_ids + answer.output_ids])
        logits = self.model(ids).logits[0, len(answer.input_ids) - 1 : -1].float() / answer.temperature
        scores = logits.log_softmax(-1).gather(-1, torch.tensor(answer.output_ids)[:, None]).squeeze(-1)
        gaps = (scores - torch.tensor(answer.logprobs)).abs()[start:]
        return float(gaps.max()) if len(gaps) else 0.0

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Other weights."""
        self.model.load_state_dict({**self.own, **tensors}, strict=False)
        self.model.tie_weights()


def prompts(folder: Path, count: int) -> list[tuple[int, ...]]:
    """Chat prompts of different lengths."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for number in range(count):
        parts = " plus ".join(str((number * 37 + i * 11) % 90 + 1) for i in range(2 + number % 5))
        chat = [{"role": "user", "content": f"What is {parts}? Explain step by step, then say the number."}]
        found.append(tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)))
    return found


def ask(engine: Any, requests: list[LLMRequest], timeout_s: float = 600.0) -> list[LLMResponse]:
    """All of them at once."""

    async def together() -> list[LLMResponse]:
        return await asyncio.gather(*(engine.agenerate(request) for request in requests))

    return asyncio.run(asyncio.wait_for(together(), timeout_s))


def shifted(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the model a little different, as after a long training step."""
    generator = torch.Generator().manual_seed(0)
    (file,) = folder.glob("*.safetensors")
    return {
        name: tensor.float() * (1 + 0.02 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in load_file(file).items()
    }


def update_by(channel: WeightChannel, tensors: dict[str, torch.Tensor], number: int) -> WeightUpdate:
    """An update with these tensors, which lie ready where the channel puts them."""
    delivery = channel.put(tensors.items(), torch.float32)
    version = WeightVersion(number, version_digest(delivery.digests), "check")
    return WeightUpdate(version, delivery.source, delivery.digests)


def check_answers(
    server: ForeignServer, embedded: EmbeddedEngine, reference: Reference, report: Report, asked: list
) -> None:
    """Greedy as the embedded engine, and log-probabilities as the model's own at another temperature."""
    greedy = [LLMRequest(p, GenerationConfig(max_new_tokens=16, greedy=True)) for p in asked]
    ours, began = ask(embedded, greedy), time.perf_counter()
    theirs = ask(server, greedy)
    took = time.perf_counter() - began
    same = sum(a.output_ids == b.output_ids and a.stop_reason == b.stop_reason for a, b in zip(ours, theirs, strict=True))
    gaps = [
        abs(x - y)
        for a, b in zip(ours, theirs, strict=True)
        if a.output_ids == b.output_ids
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
    ]
    gap = max(gaps, default=float("nan"))
    made = sum(len(a.output_ids) for a in theirs)
    report.numbers(
        same == len(asked), f"greedy, {len(asked)} prompts: {same} equal to the embedded engine's, tokens and ends"
    )
    report.numbers(
        gap <= TOLERANCE,
        f"their log-probabilities differ by {gap:.1e} at most, {statistics.fmean(gaps or [float('nan')]):.1e} on average "
        f"({made} tokens, {made / took:.0f} a second)",
    )
    for temperature in (1.0, 0.7):
        gconfig = GenerationConfig(max_new_tokens=12, temperature=temperature)
        drawn = ask(server, [LLMRequest(p, gconfig, NoiseKey(1, sample=n)) for n, p in enumerate(asked[:16])])
        gap = max(reference.difference(answer) for answer in drawn)
        count = sum(len(answer.output_ids) for answer in drawn)
        report.numbers(
            gap <= TOLERANCE, f"sampled at T = {temperature}: {count} log-probabilities within {gap:.1e} of the model's own"
        )
    check_narrowed(server, reference, report, asked)
    hot = GenerationConfig(max_new_tokens=8, temperature=0.7, first_token_temperature=1.5)
    (answer,) = ask(server, [LLMRequest(asked[0], hot)])
    report.numbers(
        answer.untrained_tokens == 1 and reference.difference(answer, 1) <= TOLERANCE, "a first token of its own temperature"
    )


def check_narrowed(server: ForeignServer, reference: Reference, report: Report, asked: list) -> None:
    """With top-p, top-k and a minimum of tokens log-probabilities stay those of the whole distribution, or are refused."""
    for changes in ({"top_p": 0.8}, {"top_k": 3}, {"min_new_tokens": 12}, {"top_p": 0.9, "top_k": 20, "min_new_tokens": 12}):
        gconfig = GenerationConfig(max_new_tokens=12, temperature=0.7, **changes)
        what = ", ".join(f"{key}={value}" for key, value in changes.items())
        requests = [LLMRequest(p, gconfig, NoiseKey(2, sample=n), needs_logprobs=False) for n, p in enumerate(asked[:16])]
        drawn = ask(server, requests)
        count = sum(len(answer.output_ids) for answer in drawn)
        try:
            server.check_generation(gconfig)
        except ConfigError as refusal:
            print(f"     {what}: {count} tokens; refused for training: {refusal}", flush=True)
        else:
            gap = max(reference.difference(answer) for answer in drawn)
            report.numbers(gap <= TOLERANCE, f"{what}: {count} log-probabilities within {gap:.1e} of the model's own")
        if gconfig.min_new_tokens:
            report.line(count == 12 * len(drawn), f"{what}: no answer ended before 12 tokens")


def check_ends(server: ForeignServer, embedded: EmbeddedEngine, report: Report, asked: list, folder: Path) -> None:
    """Stop tokens and strings, seeds, a deadline."""
    plain = GenerationConfig(max_new_tokens=24, greedy=True)
    (whole,) = ask(embedded, [LLMRequest(asked[1], plain)])
    began = time.monotonic()
    ask(server, [LLMRequest(asked[1], plain)])
    deadline_s = min(1.5, 5 * (time.monotonic() - began))  # a quick server must not be done by then
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = (tokenizer.decode(whole.output_ids[start : start + 3]) for start in range(5, len(whole.output_ids) - 3))
    text = next(part for part in parts if part and "\ufffd" not in part)  # a random model's tokens may be halves of letters
    for what, gconfig in (
        ("stop token", GenerationConfig(max_new_tokens=24, greedy=True, stop_token_ids=(whole.output_ids[6],))),
        ("stop string", GenerationConfig(max_new_tokens=24, greedy=True, stop=(text,))),
    ):
        ours, theirs = (ask(engine, [LLMRequest(asked[1], gconfig)])[0] for engine in (embedded, server))
        same = (ours.output_ids, ours.stop_reason) == (theirs.output_ids, theirs.stop_reason)
        report.line(
            same and ours.stop_reason == StopReason.STOP, f"{what}: {len(theirs.output_ids)} tokens, as the embedded engine"
        )
    free = GenerationConfig(max_new_tokens=12)
    one, two, other = (ask(server, [LLMRequest(asked[2], free, NoiseKey(5, sample=s))])[0].output_ids for s in (0, 0, 1))
    print(f"     seeds: the same key gives {'the same' if one == two else 'ANOTHER'} answer, another key "
          f"{'another' if other != one else 'the same'}", flush=True)  # fmt: skip
    long = LLMRequest(asked[3], GenerationConfig(max_new_tokens=400, stop_token_ids=()), deadline_s=deadline_s)
    began = time.monotonic()
    (late,) = ask(server, [long])
    took = time.monotonic() - began
    good = late.stop_reason == StopReason.STOP or (late.stop_reason == StopReason.CANCELLED and len(late.output_ids) > 0)
    report.line(
        good and took < deadline_s + ABORT_TIMEOUT_S,
        f"a deadline of {deadline_s:.1f} s: {late.stop_reason.name} after {took:.2f} s with {len(late.output_ids)} tokens",
    )


def check_updates(server: ForeignServer, reference: Reference, report: Report, asked: list, folder: Path) -> None:
    """Updates in the middle of generation: versions, real weights, and keys and values computed anew."""
    new = shifted(folder)
    (own,) = (load_file(file) for file in folder.glob("*.safetensors"))
    own = {name: tensor.float() for name, tensor in own.items()}
    gconfig = GenerationConfig(max_new_tokens=64)
    requests = [LLMRequest(p, gconfig, NoiseKey(9, sample=n)) for n, p in enumerate(asked[:6])]
    with tempfile.TemporaryDirectory() as place, closing(DiskChannel(Path(place), folder, keep_parent=True)) as channel:
        for number, tensors in ((1, new), (2, own)):
            answers, told = _publish_during(server, requests, update_by(channel, tensors, number))
            spans = [answer for answer in answers if set(answer.versions) == {number - 1, number}]
            reference.take(new if number % 2 else {})
            gap = max((reference.difference(a, a.versions.index(number)) for a in spans), default=float("inf"))
            compared = f"{told['verify_s']:.2f} s of it comparing {server.statistics()['verified_tensors']:.0f} tensors"
            report.line(
                len(spans) >= len(requests) // 2 and gap <= TOLERANCE,
                f"update {number}, {len(requests)} running: {len(spans)} spanned it, their log-probabilities "
                f"then are the new weights' own within {gap:.1e}; pause {told['pause_s']:.2f} s, {compared}",
            )
        pauses = []
        for number in (3, 4, 5):
            update = update_by(channel, new if number % 2 else own, number)
            server.prepare_weights(update)
            pauses.append(server.commit_weights(update.version)["pause_s"])
    print(f"     three updates of an idle server: pause {statistics.median(pauses):.2f} s (median)", flush=True)


def check_memory(server: ForeignServer, reference: Reference, report: Report, asked: list, folder: Path) -> None:
    """An update from shared memory, without a folder: vLLM by its worker extension, SGLang by a gloo group."""
    if isinstance(server, SGLangServer):
        server.take_by_group()
    channel = SharedMemoryChannel()
    new = shifted(folder)
    update = update_by(channel, new, 7)
    server.prepare_weights(update)
    told = server.commit_weights(update.version)
    reference.take(new)
    answers = ask(server, [LLMRequest(p, GenerationConfig(max_new_tokens=16)) for p in asked[:8]])
    gap = max(reference.difference(answer) for answer in answers)
    good = gap <= TOLERANCE and {v for a in answers for v in a.versions} == {7}
    report.line(good, f"an update from shared memory: within {gap:.1e} of the new weights; pause {told['pause_s']:.2f} s")
    channel.close()


def _publish_during(
    server: ForeignServer, requests: list, update: WeightUpdate
) -> tuple[list[LLMResponse], dict[str, float]]:
    told: dict[str, float] = {}
    server.prepare_weights(update)
    before = server.statistics()["server_tokens"]

    def publish() -> None:
        until_busy(server, requests, before)
        told.update(server.commit_weights(update.version))

    publisher = threading.Thread(target=publish)
    publisher.start()
    answers = ask(server, requests)
    publisher.join()
    return answers, told


def until_busy(server: ForeignServer, requests: list[LLMRequest], before: float) -> None:
    """Waits, half a minute at most, until all run and have some tokens; ``before``: its counter before they came."""
    deadline = time.monotonic() + 30
    wanted = before + sum(len(request.input_ids) + 2 for request in requests)  # servers count those of prompts too
    while time.monotonic() < deadline:
        seen = server.statistics()
        if seen["running"] >= len(requests) and seen["server_tokens"] >= wanted:
            return
        time.sleep(0.01)


def check_kill(server: ForeignServer, report: Report, asked: list) -> None:
    """kill -9 in the middle of requests, and what is left of the server."""
    assert server.process is not None
    main = psutil.Process(server.process.pid)
    family = [main, *main.children(recursive=True)]
    ends: list[str] = []
    before = server.statistics()["server_tokens"]

    async def run() -> None:
        requests = [LLMRequest(p, GenerationConfig(max_new_tokens=300)) for p in asked[:4]]
        tasks = [asyncio.ensure_future(server.agenerate(request)) for request in requests]
        await asyncio.to_thread(until_busy, server, requests, before)
        main.kill()
        killed = time.monotonic()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            ends.append(type(result).__name__ if isinstance(result, InfrastructureFailure) else f"?{result!r}")
        ends.append(f"{time.monotonic() - killed:.2f} s")

    asyncio.run(asyncio.wait_for(run(), 60))
    server.close()
    left = [process.pid for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    report.line(
        not left and not any(end.startswith("?") for end in ends),
        f"kill -9: {', '.join(ends)}; {len(left)} of {len(family)} processes left",
    )


def check(make: Callable[..., ForeignServer], python: str, options: argparse.Namespace, report: Report, asked: list) -> None:
    """All checks of one server."""
    cpus, dtype = tuple(options.cpus) if options.cpus else None, getattr(torch, options.dtype)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "server.log"
        server = make(
            options.model,
            python=python,
            log_file=log,
            dtype=dtype,
            version=WeightVersion(0),
            settings=SETTINGS,
            cpus=cpus,
            options=options.option,
            startup_timeout_s=options.startup_timeout_s,
            progress=lambda words: print(f"     {words}", flush=True),
        )
        try:
            report.line(
                True,
                f"{server.name} started in {time.monotonic() - began:.0f} s; capabilities {sorted(server.capabilities)}",
            )
            core = EngineCore(options.model, SETTINGS, dtype, "cpu", WeightVersion(0))
            embedded = EmbeddedEngine(core, version=WeightVersion(0), threads=torch.get_num_threads())
            reference = Reference(options.model)
            check_answers(server, embedded, reference, report, asked)
            if report.exact:
                check_ends(server, embedded, report, asked, options.model)
                check_updates(server, reference, report, asked, options.model)
                check_memory(server, reference, report, asked, options.model)
                check_kill(server, report, asked)
            embedded.close()
        except BaseException:
            print(server.process.last_words(60) if server.process else "", flush=True)
            raise
        finally:
            server.close()
            if options.keep_log:
                (Path(options.keep_log) / f"{server.protocol.maker}.log").write_bytes(log.read_bytes())


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder with one safetensors file")
    parser.add_argument("--vllm", help="python of the environment that has vLLM")
    parser.add_argument("--sglang", help="python of the environment that has SGLang")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--cpus", type=int, nargs="*", help="cores of the servers; default: all")
    parser.add_argument("--option", action="append", default=[], help="one more word of the servers' command, --option=WORD")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--startup-timeout-s", type=float, default=600.0)
    parser.add_argument("--keep-log", help="folder for the servers' logs")
    options = parser.parse_args()
    report, asked = Report(options.dtype == "float32"), prompts(options.model, options.prompts)
    for make, python in ((VllmServer.start, options.vllm), (SGLangServer.start, options.sglang)):
        if python:
            check(make, python, options, report, asked)
    print(f"{report.failed} checks failed", flush=True)
    return report.failed


if __name__ == "__main__":
    sys.exit(main())
