"""The critic: predicts the return of a sample before each of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.algorithms.losses import clipped_value_loss, token_mean
from tandem.api.batch import num_sequences, select, stage, trained_tokens, update_stage, with_fields
from tandem.api.engines import LossFn, Outputs, TrainEngine
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.requests import StopReason
from tandem.config.train_engine import ActorConfig, CriticConfig, either
from tandem.roles.actor import mini_batches
from tandem.roles.batch_metrics import step_metrics

_KEPT = ("loss", "grad_norm", "lr", "skipped", "clip_fraction")


class Values:
    """The stage that every critic runs before the actor's advantages are computed."""

    engine: TrainEngine

    @stage(
        "values",
        reads=("input_ids", "loss_mask", "stop_reason"),
        adds=("values", "bootstrap_value"),
        reads_state=("weights",),
    )
    def compute_values(self, batch: TensorDict) -> TensorDict:
        """Adds ``values [T]``, the value before each token (0 at the first token of a sequence), and
        ``bootstrap_value [N]``, the value after the last token of trajectories that the length limit cut off (0 for
        others)."""
        after = self.engine.forward(batch).scores
        assert after is not None
        bounds = batch["cu_seqlens"]
        filled = bounds.diff() > 0  # [N]
        end = torch.zeros(num_sequences(batch), device=after.device)
        end[filled] = after[bounds[1:][filled] - 1]
        cut = batch["stop_reason"] == StopReason.LENGTH
        return with_fields(batch, values=_before(after, batch), bootstrap_value=end.masked_fill(~cut, 0.0))


class Critic(Values):
    """An engine with a scalar head: call `compute_values` before the actor's advantages are computed, `update` afterwards.

    Batches are global, and methods return new ones; each rank calls the same methods with the same batch.
    """

    def __init__(
        self, engine: TrainEngine, config: CriticConfig, actor: ActorConfig, *, seed: int = 0, updates_so_far: int = 0
    ):
        """``actor``: its ``mini_batches`` are used, and its ``epochs_per_batch`` if ``config`` does not set them. ``seed``:
        seed of the order of groups in several epochs. ``updates_so_far``: number of batches that the critic was trained on
        before.
        """
        self.engine, self.config, self.seed, self.updates = engine, config, seed, updates_so_far
        self.mini_batches = actor.mini_batches
        self.epochs_per_batch: int = either(config, actor, "epochs_per_batch")

    def state_dict(self) -> dict[str, Any]:
        """Returns the engine's state, and the number of batches that the critic was trained on."""
        return {"updates": self.updates, "engine": self.engine.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = int(state["updates"])
        self.engine.load_state_dict(state["engine"])

    @property
    def warming_up(self) -> bool:
        """True while the actor is not updated, because the critic has had fewer than ``warmup_steps`` updates."""
        return self.updates < self.config.warmup_steps

    @update_stage(
        title="update values",
        reads=("input_ids", "loss_mask", "values", "returns", "dropped", "in_loss", "group_id"),
    )
    def update(self, batch: TensorDict) -> dict[str, float]:
        """Takes the optimizer steps of one batch on its ``returns``; every trained token has the same weight.

        Returns ``value/loss``, ``value/explained_variance``, ``value/mean``, ``returns/mean`` and others.

        Raises:
            NonFinite: too many steps in a row were not finite.
        """
        inside = select(batch, batch["in_loss"])
        steps = []
        for part in mini_batches(inside, self.mini_batches, self.epochs_per_batch, self.seed):
            mask = trained_tokens(part)
            if not bool(mask.any()):
                continue
            weighted = with_fields(part, loss_weights=token_mean(mask) * ~part["dropped"])
            steps.append(self.engine.train_batch(weighted, self.loss) | {"tokens": float(part["loss_mask"].sum())})
        self.updates += 1
        metrics = step_metrics(steps) if steps else {}
        return {f"value/{name}": metrics[name] for name in _KEPT if name in metrics} | _fit(inside)

    def loss(self, outputs: Outputs, view: TensorDict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss function for `TrainEngine.train_batch`: returns losses and metrics, ``[T]`` each."""
        return _value_loss(outputs, view, self.config.value_clip)


class SharedCritic(Values):
    """The second head of the actor's model (``head="both"``), trained in the actor's optimizer steps.

    Pass it as `Actor(shared_critic=…)`.
    """

    warming_up = False

    def __init__(self, engine: TrainEngine, config: CriticConfig):
        """``engine``: the actor's engine. ``config``: only ``loss_weight`` and ``value_clip`` are used."""
        self.engine, self.config = engine, config

    def joined(self, objective: LossFn) -> LossFn:
        """Returns a loss function: the actor's loss per token plus ``loss_weight`` times the value loss."""

        def both(outputs: Outputs, view: TensorDict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            losses, metrics = objective(outputs, view)
            of_values, about = _value_loss(outputs, view, self.config.value_clip)
            kept = about.pop("kept")
            named = {f"value/{name}": value for name, value in about.items()}
            named["value/loss"] = of_values.detach() * kept
            return losses + self.config.loss_weight * of_values, dict(metrics) | named

        return both

    @stage("fit of values", reads=("loss_mask", "values", "returns", "in_loss"))
    def update(self, batch: TensorDict) -> dict[str, float]:
        """Returns metrics of how well the values predicted the returns. The actor's update has trained the head already."""
        return _fit(select(batch, batch["in_loss"]))


def _before(after: torch.Tensor, batch: TensorDict) -> torch.Tensor:
    """Shifts the head's outputs after each token ``[T]`` to values before each token ``[T]``; 0 at the first token
    of a sequence."""
    first = torch.zeros_like(after, dtype=torch.bool)
    starts = batch["cu_seqlens"][:-1]
    first[starts[starts < len(after)]] = True
    return after.roll(1).masked_fill(first, 0.0)


def _value_loss(outputs: Outputs, view: TensorDict, clip: float | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns losses and metrics, ``[T]`` each; ``kept`` is 1 at the tokens that metrics are averaged over."""
    assert outputs.scores is not None
    mask = trained_tokens(view)
    values = _before(outputs.scores, view)
    losses, metrics = clipped_value_loss(values, view["values"], view["returns"], mask, clip=clip)
    kept = (mask & ~view["dropped"]).float()
    named = {name.removeprefix("value_"): value * kept for name, value in metrics.items()}
    return losses, {"kept": kept} | named


def _fit(batch: TensorDict) -> dict[str, float]:
    """Returns metrics that compare the values before the update with the returns."""
    mask = trained_tokens(batch)
    values, returns = batch["values"][mask].double(), batch["returns"][mask].double()
    if not len(returns):
        return {}
    metrics = {"value/mean": float(values.mean()), "returns/mean": float(returns.mean())}
    if bool(returns.max() > returns.min()):
        unexplained = (returns - values).var(correction=0) / returns.var(correction=0)
        metrics["value/explained_variance"] = 1 - float(unexplained)
    return metrics
