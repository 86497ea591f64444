"""Steps of tiny models under every layout of as many ranks as there are; importable by child processes."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from tandem.api.batch import concatenate
from tandem.api.team import Team
from tandem.config.train_engine import OptimizerConfig, TrainEngineConfig
from tandem.engines.train import spread
from tandem.engines.train.engine import SpreadEngine
from tandem.engines.train.holders import Sharded
from tandem.models.load import Unfilled
from tandem.models.logprobs import Vocabulary, chunked_logprobs
from tandem.state.tree import read_tree, write_tree
from tests.engines_train.steps import distance, random_batch, weighted_nll, weights_of

Case = tuple[str, str]
"""Layout, with a word for options, and model."""

OPTIONS = {
    "offloaded": {},  # see `_offloaded`
    "recomputed": {"gradient_checkpointing": True},
    "lean": {"gradient_sync": "micro_batch", "gradient_checkpointing": True, "selective_checkpointing": True},
}

CASES: dict[str, list[Case]] = {
    "2": [("d1t2", "qwen3"), ("d1c2", "qwen2"), ("d1c2", "smollm")],
    "2 more": [
        ("d1t2", "qwen2"),
        ("d1c2", "gemma3"),
        ("d1r2", "qwen3"),
        ("d2 lean", "gemma2"),
        ("d1t2", "gemma2"),
        ("d2 offloaded", "qwen2"),
    ],
    "1 zero": [("zero1:d1", "gemma2"), ("zero2:d1", "qwen2"), ("zero3:d1", "qwen3")],
    "2 zero": [("zero1:d2", "gemma2"), ("zero2:d2", "qwen3"), ("zero3:d2", "qwen2"), ("zero3:d2 recomputed", "gemma2")],
    "4": [("d2t2", "qwen3"), ("d2c2", "gemma2"), ("d2r2 lean", "qwen2"), ("d1t2c2", "qwen2"), ("d1t2r2", "qwen3")],
}
MODELS = {
    "qwen2": {},  # tied, biases
    "qwen3": {"vocab_size": 305},  # norms of heads; a vocabulary that no two ranks can halve
    "gemma2": {"num_key_value_heads": 4},  # tied, scaled embedding, soft-caps, windows, four norms
    "smollm": {"num_key_value_heads": 1},  # heads that no two ranks can halve, so that `c` gathers keys and values
    "gemma3": {"num_key_value_heads": 1, "attn_logit_softcapping": 2.0},  # the same, with windows and a soft-cap
}
HEADS = {"qwen2": "both", "qwen3": "lm", "gemma2": "lm", "smollm": "lm", "gemma3": "lm"}


def batch_of_prompts() -> TensorDict:
    """Ragged sequences, and groups of which each shares a prompt."""
    ragged = random_batch((3, 14, 2, 5, 9, 9, 4))
    groups = random_batch((11, 8, 9, 10, 13), seed=1)
    bounds = groups["cu_seqlens"].tolist()
    for i, start in enumerate(bounds[:-1]):
        first = bounds[0 if i < 3 else 3]
        groups["loss_mask"][start : start + 6] = False
        groups["loss_mask"][start + 6] = True
        groups["input_ids"][start : start + 6] = groups["input_ids"][first : first + 6]
    groups["loss_weights"] = groups["loss_weights"] * groups["loss_mask"]
    return concatenate([ragged, groups])


def loss_with_scores(outputs, view):
    """The loss of `weighted_nll`, and of the second head where there is one."""
    losses, metrics = weighted_nll(outputs, view)
    return losses if outputs.scores is None else losses + 0.1 * (outputs.scores - 1).square(), metrics


def backend_of(layout: str) -> str:
    """ "d2" → "fsdp:d2", "zero3:d2" → "deepspeed:zero3:d2"."""
    return f"{'deepspeed' if layout.startswith('zero') else 'fsdp'}:{layout}"


def engine_on(folder: Path, layout: str, head: str = "lm", *, lr=1e-2, eps=1e-8, **config) -> SpreadEngine:
    layout, *words = layout.split()
    for word in words:
        config |= OPTIONS[word]
    if "offloaded" in words:
        return _offloaded(engine_on, folder, layout, head, lr=lr, eps=eps, **config)
    options = TrainEngineConfig(
        path=str(folder),
        backend=backend_of(layout),
        dtype=config.pop("dtype", "float32"),
        optimizer=OptimizerConfig(lr=lr, eps=eps, max_grad_norm=config.pop("max_grad_norm", 0.5), weight_decay=0.0),
        max_tokens_per_micro_batch=config.pop("max_tokens", 20),
        logprob_chunk_tokens=7,
        **config,
    )
    return SpreadEngine(options, total_steps=10, head=head)


def _offloaded(make, *arguments, **options) -> SpreadEngine:
    """An engine whose shards are where those of `actor.offload=true` are, which is refused without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread, "Sharded", lambda *given: Sharded(*given[:-2], "micro_batch", True))
        return make(*arguments, **options)


def gradients(folder: Path, layout: str, head: str, batch: TensorDict, **config) -> dict[str, torch.Tensor]:
    """By name: what a step of an optimizer moves whose step is the gradient (Adam's denominator is its offset)."""
    engine = engine_on(folder, layout, head, lr=1e4, eps=1e4, max_grad_norm=None, **config)
    before = weights_of(engine)
    engine.train_batch(batch, loss_with_scores, entropy=True)
    return {name: before[name] - after for name, after in weights_of(engine).items()}


def steps(folder: Path, layout: str, head: str, out: Path, **config):
    """Gradients of the first step, then three steps: metrics, weights, outputs; saved and loaded again."""
    batch = batch_of_prompts()
    found = {"gradients": gradients(folder, layout, head, batch, **config)}
    engine = engine_on(folder, layout, head, **config)
    found["before"] = weights_of(engine)
    found["metrics"] = [engine.train_batch(batch, loss_with_scores, entropy=True) for _ in range(3)]
    found["after"] = weights_of(engine)
    outputs = engine.forward(batch, entropy=True)
    found["outputs"] = {name: value for name, value in outputs._asdict().items() if value is not None}
    found["evaluated"] = engine.eval_batch(batch, loss_with_scores, entropy=True)
    engine.save(out / f"{layout}-{folder.name}")
    fresh = engine_on(folder, layout, head, **config)
    fresh.load(out / f"{layout}-{folder.name}")
    found["loaded"] = weights_of(fresh)
    going = gone_on(engine, engine_on(folder, layout, head, **config), out / f"{layout}-{folder.name}-state")
    found["next"], found["resumed"] = ({"metrics": e.train_batch(batch, loss_with_scores)} for e in (engine, going))
    found["next"]["weights"], found["resumed"]["weights"] = weights_of(engine), weights_of(going)
    other = {name: 0.9 * tensor for name, tensor in found["before"].items()}
    with fresh.using(other.items()):
        found["others"] = weights_of(fresh)
    found["back"] = weights_of(fresh)
    if "zero" in layout:
        found["disturbed"] = disturbed(going, batch)
        found["there"], found["and back"] = there_and_back(going, folder, layout, head, out, **config)
    if "zero1" in layout:
        return found  # refused in bfloat16
    rough = engine_on(folder, layout, head, dtype="bfloat16", **config)
    found["bfloat16"] = rough.train_batch(batch, loss_with_scores, entropy=True)
    return found


def disturbed(engine: SpreadEngine, batch: TensorDict) -> tuple[float, float, float]:
    """After a step that is not finite, one whose loss raises half-way, and one without information: how many were skipped,
    the last one's gradient norm, and how far the weights moved. DeepSpeed also moved all to host memory and back."""
    before, passes = weights_of(engine), []

    def endless(outputs, view):
        return outputs.logprobs * torch.inf, {}

    def raises(outputs, view):
        passes.append(view)
        if len(passes) == 2:
            raise ZeroDivisionError
        return loss_with_scores(outputs, view)

    def flat(outputs, view):
        return outputs.logprobs * 0, {}

    skipped = engine.train_batch(batch, endless)["skipped"]
    with pytest.raises(ZeroDivisionError):
        engine.train_batch(batch, raises)
    norm = engine.train_batch(batch, flat)["grad_norm"]
    engine.holder.leave()
    engine.holder.come_back()
    return skipped, norm, distance(before, weights_of(engine))


def there_and_back(engine: SpreadEngine, folder: Path, layout: str, head: str, out: Path, **config):
    """How far weights are from those of ``engine``, and how far it moved: after a step of an FSDP engine that goes on from
    its state, and after a step of another one of ``layout`` that goes on from that one's."""
    batch, found = batch_of_prompts(), []
    other = engine_on(folder, layout.split(":")[1].split()[0], head, **config)
    for number, taker in enumerate((other, engine_on(folder, layout, head, **config))):
        gone_on(engine if number == 0 else other, taker, out / f"{layout}-{folder.name}-{number}")
        before = weights_of(taker)
        for each in (engine, taker) if number == 0 else (engine, other, taker):
            each.train_batch(batch, loss_with_scores)
        after = weights_of(engine)
        found.append((distance(weights_of(taker), after), distance(before, after)))
    return found


def gone_on(engine: SpreadEngine, other: SpreadEngine, state: Path) -> SpreadEngine:
    """``other``, with the state of ``engine`` out of a folder that every rank reads."""
    write_tree(Team(), state, engine.state_dict())
    if dist.is_initialized():
        dist.barrier()
    other.load_state_dict(read_tree(state))
    return other


@functools.cache
def steps_of_one_process(folder: Path, head: str, out: Path):
    """`steps`, made once: many groups of ranks are compared with them."""
    return steps(folder, "d1", head, out)


def all_steps(folders: dict[str, Path], cases: list[Case], out: Path, ranks: int):
    """ "layout model" → `steps`, and `vocabulary_parallel`."""
    torch.set_num_threads(1)
    if dist.is_initialized():
        found = {f"{layout} {name}": steps(folders[name], layout, HEADS[name], out) for layout, name in cases}
    else:
        found = {f"d1 {name}": steps_of_one_process(folders[name], HEADS[name], out) for name in {name for _, name in cases}}
    found["vocabulary"] = [vocabulary_parallel(ranks, softcap, entropy) for softcap, entropy in HEAD_OPTIONS]
    if ranks == 2:
        spread = ("zero3:d2",) if any("zero" in layout for layout, _ in cases) else ("d2", "d1t2")
        found["held"] = {layout: most_held(folders["deep"], layout) for layout in spread}
    return found


def most_held(folder: Path, layout: str) -> int:
    """Most entries of parameters that this rank has at a time while it opens a model."""
    held, fill = [], Unfilled.fill

    def watched(unfilled, module, pieces):
        fill(unfilled, module, pieces)
        parameters = [p for p in unfilled.model.parameters() if not p.is_meta]
        held.append(sum(part_of(p).numel() for p in parameters))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unfilled, "fill", watched)
        engine_on(folder, layout)
    return max(held)


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    """What a rank has of it."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return getattr(parameter, "ds_tensor", parameter)  # DeepSpeed's stage 3


HEAD_OPTIONS = [(None, False), (None, True), (3.0, True)]


def vocabulary_parallel(ranks: int, softcap: float | None, entropy: bool) -> dict[str, torch.Tensor]:
    """Log-probabilities, entropies, and the gradients of hidden states and of the whole head; 11 tokens of a vocabulary of
    305, in several chunks and at several temperatures."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(11, 16, generator=generator, requires_grad=True)
    whole = torch.randn(305, 16, generator=generator)
    targets = torch.randint(0, 305, (11,), generator=generator)
    temperature = 0.5 + torch.rand(11, generator=generator)
    pulls = torch.randn(2, 11, generator=generator)
    each = -(-305 // ranks)
    rank = dist.get_rank() if ranks > 1 else 0
    weight = whole[rank * each : (rank + 1) * each].clone().requires_grad_()
    settings = {"softcap": softcap, "entropy": entropy, "chunk_tokens": 4}
    if ranks == 1:
        found = chunked_logprobs(hidden, weight, targets, temperature, **settings)
    else:
        mine = Vocabulary(dist.group.WORLD, rank * each)
        found = chunked_logprobs(hidden, weight, targets, temperature, vocabulary=mine, **settings)
    total = (found.logprobs * pulls[0]).sum()
    if entropy:
        total = total + (found.entropy * pulls[1]).sum()
    total.backward()
    gradient = torch.zeros_like(whole)
    gradient[rank * each : (rank + 1) * each] = weight.grad
    if ranks > 1:
        dist.all_reduce(gradient)
    entropies = found.entropy.detach() if entropy else torch.zeros(0)
    return {"logprobs": found.logprobs.detach(), "entropy": entropies, "hidden": hidden.grad, "head": gradient}
