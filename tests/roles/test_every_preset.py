"""Every preset takes a step, and the step does not depend on how the batch is cut, ordered or distributed."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tandem.api.batch import num_sequences, select
from tandem.config.presets import PRESETS
from tests.roles.batches import moved, step, weights_of
from tests.roles.presets import full_batch, preset_actor
from tests.tiny import tiny_model_folder

VARIANTS = {name: (name,) for name in PRESETS} | {
    "clip_cov": ("grpo", "algorithm.policy_loss={name: clip_cov, share: 0.3, low: -9, high: 9}"),
    "kl_cov": ("grpo", "algorithm.policy_loss={name: kl_cov, share: 0.3}"),
    "gspo_token": ("gspo", "algorithm.policy_loss=gspo_token"),
    "top_entropy": ("grpo", "algorithm.token_filter=top_entropy"),
    "adaptive": ("grpo", "algorithm.kl={coefficient: 0.1, target: 1.0, horizon: 50}"),
    "importance": ("grpo", "algorithm.kl={coefficient: 0.1, importance: true, estimator: k1}"),
    "rejecting": (
        "grpo",
        "algorithm.correction={weight: truncate, high: 1.05, reject: {name: product, low: 0.9, high: 1.2}}",
    ),
}
"""Presets, and parts that no preset has."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"), num_hidden_layers=1)


def updated(folder, batch, variant, **settings):
    """Metrics of two batches' steps, weights before and after."""
    actor = preset_actor(folder, *VARIANTS[variant], **settings)
    before = weights_of(actor)
    metrics = step(actor, batch)
    later = select(batch, torch.arange(num_sequences(batch)))
    later["versions"] = torch.where(later["versions"] == 0, 1, later["versions"])
    return [metrics, step(actor, later)], before, weights_of(actor)


def the_same(one, other):
    (metrics, before, after), (theirs, _, weights) = one, other
    for mine, their in zip(metrics, theirs, strict=True):
        assert their == pytest.approx(mine, rel=1e-3, abs=1e-5)
    assert moved(before, after) > 1e-5
    assert moved(after, weights) <= 1e-3 * moved(before, after)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_micro_batches_and_order_change_nothing(folder, variant):
    """Two mini-batches, so that ratios differ from 1; the order within one mini-batch."""
    batch = full_batch(folder)
    the_same(*(updated(folder, batch, variant, max_tokens=m, mini_batches=2) for m in (1000, 12)))
    order = torch.randperm(num_sequences(batch), generator=torch.Generator().manual_seed(3))
    trajectories = [int(i) for i in order if int(i) != 8]  # the two trajectories of a sample keep their order
    trajectories.insert(trajectories.index(7) + 1, 8)
    the_same(*(updated(folder, b, variant) for b in (batch, select(batch, trajectories))))


def child(rank, folder, out):
    torch.set_num_threads(1)
    with contextlib.redirect_stderr(io.StringIO()):
        dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=2)
        batch = torch.load(out / "batch.pt", weights_only=False)
        found = {name: updated(folder, batch, name, ranks=2, mini_batches=2)[::2] for name in VARIANTS}
        torch.save(found, out / f"rank-{rank}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    torch.save(full_batch(folder), out / "batch.pt")
    mp.spawn(child, (folder, out), nprocs=2)
    return [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_two_ranks_take_the_same_step_as_one(folder, two_ranks, variant):
    alone = updated(folder, full_batch(folder), variant, mini_batches=2)
    for found in two_ranks:
        metrics, weights = found[variant]
        the_same(alone, (metrics, alone[1], weights))


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_what_is_not_trained_may_hold_anything(folder, variant):
    """Prompts' log-probabilities, values and rewards of tokens are nobody's business."""
    batch = full_batch(folder)
    dirty = select(batch, torch.arange(num_sequences(batch)))
    for name in ("rollout_logprobs", "reference_logprobs", "values"):
        dirty[name] = dirty[name].masked_fill(~dirty["loss_mask"], float("nan"))
    the_same(*(updated(folder, b, variant) for b in (batch, dirty)))
