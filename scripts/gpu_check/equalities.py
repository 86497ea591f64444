"""Equalities that hold on every device: the engine's forward pass and transformers', packed and padded, delivered and
trained, resumed and uninterrupted.

In float32 a limit is absolute. In bfloat16 the measure is transformers itself: how far its bfloat16 pass is from its float32
one, and ours may be `BF16` times as far.
"""

import asyncio
from collections.abc import Iterator, Sequence

import torch
from tensordict import TensorDict
from transformers import PreTrainedModel

from scripts.gpu_check.place import DTYPES, Line, Place
from tandem.api.batch import pack
from tandem.api.engines import Outputs, TrainEngine
from tandem.api.requests import LLMRequest, LLMResponse, NoiseKey
from tandem.api.weights import WeightVersion, tensor_digest, version_digest
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.engines.inference.core import EngineCore
from tandem.weights.publisher import KEY, WeightPublisher

FP32 = 5e-4
"""Largest gap of a log-probability, nats."""

BF16 = 2.0
FLOOR = 1e-3
"""The mean difference that bfloat16 may have, whatever transformers' own error is, nats."""

STEP = 1e-3
"""A share of what a step moves, in float32."""


def score(model: torch.nn.Module, ids: Sequence[int], device: str | torch.device) -> torch.Tensor:
    """Log-probability of each token but the first, by one plain pass, ``[T - 1]``."""
    tokens = torch.tensor([ids], device=device)
    with torch.no_grad():
        logprobs = model(tokens).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, tokens[0, 1:, None]).squeeze(-1).cpu()


def compared(what: str, dtype: str, ours: torch.Tensor, exact: torch.Tensor, theirs: torch.Tensor) -> Line:
    """``exact``: transformers in float32; ``theirs``: in this dtype."""
    gap = (ours - exact).abs()
    if dtype == "fp32":
        return Line(what, f"largest gap {gap.max():.2e} nats", f"at most {FP32:g}", bool(gap.max() <= FP32))
    own = (theirs - exact).abs().mean()
    limit = BF16 * own + FLOOR
    return Line(what, f"mean gap {gap.mean():.4f} nats", f"at most {limit:.4f}", bool(gap.mean() <= limit))


def compared_answers(
    what: str, dtype: str, answers: Sequence[LLMResponse], exact: PreTrainedModel, theirs: PreTrainedModel
) -> Line:
    """The engine's log-probabilities of the tokens that it drew."""
    tables = []
    for answer in answers:
        ids, start = answer.input_ids + answer.output_ids, len(answer.input_ids) - 1
        rows = [torch.tensor(answer.logprobs), *(score(m, ids, exact.device)[start:] for m in (exact, theirs))]
        tables.append(torch.stack(rows))
    return compared(what, dtype, *torch.cat(tables, 1))


def engine_is_transformers(place: Place) -> Iterator[Line]:
    """Compares the log-probabilities that the embedded engine gives the tokens that it drew with those of transformers."""
    exact = place.reference("fp32")
    for dtype in DTYPES:
        settings = EmbeddedEngineConfig(kv_cache_gib=0.05 if place.quick else 2.0, max_running=64)
        core = EngineCore(place.model, settings, DTYPES[dtype], place.device, WeightVersion(0))
        gconfig = GenerationConfig(max_new_tokens=place.of(128, 12), min_new_tokens=place.of(128, 12))
        lengths = (1, 5, 17, 40, 9, 30) if place.quick else (1, 17, 300, 40, 128, 65, 256, 9)
        for number, prompt in enumerate(place.prompts(lengths)):
            core.add(number, LLMRequest(prompt, gconfig, NoiseKey(0, sample=number)))
        answers: list[LLMResponse] = []
        while core.has_work:
            answers += [answer for _, answer in core.step()]
        yield compared_answers(f"engine = transformers, {dtype}", dtype, answers, exact, place.reference(dtype))


def batch_of(place: Place, rows: Sequence[Sequence[int]], starts: Sequence[int] | None = None) -> TensorDict:
    """A packed batch; trained from each row's start on."""
    made, weights = [], []
    for number, row in enumerate(rows):
        mask = torch.arange(len(row)) >= (1 if starts is None else starts[number])
        made.append({"input_ids": torch.tensor(row), "loss_mask": mask, "temperature": torch.tensor(1.0)})
        weights.append(mask / mask.sum() / len(rows))
    batch = pack(made)
    batch["loss_weights"] = torch.cat(weights)
    return batch


def nll(outputs: Outputs, view: TensorDict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of fine-tuning."""
    return -outputs.logprobs * view["loss_mask"], {}


def packed_is_padded(place: Place) -> Iterator[Line]:
    """The training engine's packed pass, and transformers' one of each sequence; and a step in one piece and in several."""
    lengths = (3, 14, 2, 25, 9, 40, 4) if place.quick else (300, 14, 2, 512, 90, 1000, 4, 257)
    rows = place.prompts(lengths, seed=1)
    exact, longest = place.reference("fp32"), max(lengths)
    for dtype in DTYPES:
        batch = batch_of(place, rows)
        found = place.trainer(dtype).forward(batch).logprobs.cpu()
        mask, rounded = batch["loss_mask"].cpu(), place.reference(dtype)
        right, theirs = (torch.cat([score(m, row, place.device) for row in rows]) for m in (exact, rounded))
        yield compared(f"packed = one by one, {dtype}", dtype, found[mask].float(), right, theirs)
        whole, parts = (place.trainer(dtype, max_tokens=n) for n in (sum(lengths), longest))
        before = weights_of(whole)
        reports = [engine.train_batch(batch, nll) for engine in (whole, parts)]
        moved, apart = distance(before, weights_of(whole)), distance(weights_of(whole), weights_of(parts))
        norms = [report["grad_norm"] for report in reports]
        if dtype == "fp32":
            good = moved > 0 and apart <= STEP * moved
            yield Line("a step in one piece = in several, fp32", f"{apart / moved:.1e} of it", f"at most {STEP:g}", good)
        else:
            gap = abs(norms[0] - norms[1]) / norms[0]
            yield Line("gradient in one piece = in several, bf16", f"norms differ by {gap:.1e}", "at most 0.02", gap <= 0.02)


def shared_is_alone(place: Place) -> Iterator[Line]:
    """Completions that share prompts, which a GPU attends to by two variable-length calls in bfloat16, and transformers'
    pass of each sequence; and gradients with prompts shared and with one sequence a micro-batch, which shares nothing."""
    sizes = (
        ((9, (3, 7, 5)), (4, (2, 6))) if place.quick else ((200, (64, 300, 17, 128)), (90, (256, 31)), (512, (90, 40, 5)))
    )
    rows, starts = [], []
    for number, (prompt, completions) in enumerate(sizes):
        (beginning,) = place.prompts((prompt,), seed=10 + number)
        rows += [[*beginning, *rest] for rest in place.prompts(completions, seed=20 + number)]
        starts += [prompt] * len(completions)
    exact, batch = place.reference("fp32"), batch_of(place, rows, starts)
    for dtype in DTYPES:
        together, alone = (place.trainer(dtype, max_tokens=n) for n in (sum(map(len, rows)), max(map(len, rows))))
        found, rounded = together.forward(batch).logprobs.cpu()[batch["loss_mask"]].float(), place.reference(dtype)
        right, theirs = (
            torch.cat([score(m, row, place.device)[start - 1 :] for row, start in zip(rows, starts, strict=True)])
            for m in (exact, rounded)
        )
        yield compared(f"shared prompts = one by one, {dtype}", dtype, found, right, theirs)
        norms = [engine.train_batch(batch, nll)["grad_norm"] for engine in (together, alone)]
        gap, limit = abs(norms[0] - norms[1]) / norms[0], STEP if dtype == "fp32" else 0.02
        yield Line(f"gradient of shared prompts = in pieces, {dtype}", f"{gap:.1e}", f"at most {limit:g}", gap <= limit)


def options_are_plain(place: Place) -> Iterator[Line]:
    """A step with its shards in host memory, and one of compiled layers. Without a GPU the first is refused, and the second
    waits long for a compiler; the tests have both there."""
    if not place.device.startswith("cuda"):
        yield Line("a step with offload or compile = without", "run on a GPU only")
        return
    batch, longest = batch_of(place, place.prompts((30, 14, 25, 9), seed=4)), 40  # several micro-batches
    norm = place.trainer("bf16", max_tokens=longest).train_batch(batch, nll)["grad_norm"]
    for option in ("offload", "compile"):
        engine = place.trainer("bf16", max_tokens=longest, **{option: True})
        before = weights_of(engine)
        gap = abs(engine.train_batch(batch, nll)["grad_norm"] - norm) / norm
        good = gap <= 0.02 and distance(before, weights_of(engine)) > 0
        yield Line(f"a step with {option} = without, bf16", f"norms differ by {gap:.1e}", "at most 0.02", good)


def weights_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Copies on the CPU."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in engine.weights()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Euclidean, over all weights."""
    return sum(float((a[name].double() - b[name].double()).pow(2).sum()) for name in a) ** 0.5


def delivered_is_trained(place: Place) -> Iterator[Line]:
    """After a step and a publish the engine serves the trainer's weights: by digest, and by what it says of its tokens."""
    for dtype, placement in (("bf16", "colocate"), ("bf16", "decoupled"), ("fp32", "colocate")):
        trainer = place.trainer(dtype, lr=1e-3)
        name = "float32" if dtype == "fp32" else "bfloat16"
        rollout = RolloutConfig(dtype=name, engine=EmbeddedEngineConfig(kv_cache_gib=0.05 if place.quick else 2.0))
        engine = build_inference_engine(
            rollout, folder=place.model, placement=placement, threads=1, device=place.device, deterministic=False
        )
        publisher = WeightPublisher(trainer, engine, run="gpu-check", dtype=DTYPES[dtype])
        try:
            trainer.train_batch(batch_of(place, place.prompts((20, 30), seed=2)), nll)
            publisher.publish()
            digests = {name: tensor_digest(tensor, KEY) for name, tensor in trainer.weights(DTYPES[dtype])}
            same = engine.version.digest == publisher.version.digest == version_digest(digests)
            said = f"version {engine.version.number}, digest {engine.version.digest[:12]}"
            yield Line(
                f"delivered = trained, {dtype}, {placement}", said, "the trainer's", same and engine.version.number == 1
            )
            gconfig = GenerationConfig(max_new_tokens=place.of(64, 8), min_new_tokens=place.of(64, 8))
            asked = [LLMRequest(p, gconfig, NoiseKey(1, sample=i)) for i, p in enumerate(place.prompts((9, 33, 60), 3))]

            async def ask(asked=asked, engine=engine) -> list[LLMResponse]:
                return await asyncio.wait_for(asyncio.gather(*(engine.agenerate(request) for request in asked)), 300)

            answers = asyncio.run(ask())
            rows = [answer.input_ids + answer.output_ids for answer in answers]
            batch = batch_of(place, rows, [len(answer.input_ids) for answer in answers])
            trained = trainer.forward(batch).logprobs[batch["loss_mask"]].float().cpu()
            gap = (trained - torch.cat([torch.tensor(answer.logprobs) for answer in answers])).abs()
            seen, limit = (gap.max(), FP32) if dtype == "fp32" else (gap.mean(), 0.05)
            word = "largest" if dtype == "fp32" else "mean"
            what = f"engine = trainer after a publish, {dtype}, {placement}"
            yield Line(what, f"{word} gap {seen:.2e} nats", f"at most {limit:g}", bool(seen <= limit))
        finally:
            publisher.close()
            engine.close()
