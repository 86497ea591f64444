"""The training steps, one function for each kind of training.

A step function receives ``run``, which has one attribute for each role, such as ``run.actor``. The training loop calls the
function to train. `tandem.flow.stages` calls it with roles that only record their calls, which gives the graph of the run.
Therefore its branches may depend only on constants of a role, and on whether a role is None.
"""

from typing import Any

Metrics = dict[str, float]


def learn_from_rewards(run: Any) -> tuple[Any, Metrics]:
    """The step of reinforcement learning: generate → reward → advantage → loss → update → publish. Returns the batch with
    all its fields, and metrics."""
    metrics: Metrics = {}
    batch = run.rollout.prepare_batch(run.loader, run.workflow)
    if run.verifier is not None:
        metrics |= run.verifier.verify_if_due(batch)
    if run.reference is not None:
        batch = run.reference.compute_logprobs(batch)
    if run.critic is not None:
        batch = run.critic.compute_values(batch)
    if run.actor.needs_proximal:
        batch = run.actor.compute_proximal(batch)
    if run.teacher is not None:
        batch = run.teacher.compute_logprobs(batch)
    if run.constraint is not None:
        metrics |= run.constraint.follow(batch)
        batch = run.constraint.penalise(batch)
    batch = run.actor.compute_advantages(batch)
    metrics |= run.actor.ppo_update(batch)
    if run.critic is not None:
        metrics |= run.critic.update(batch)
    if run.reference is not None and run.reference.refreshes:
        metrics |= run.reference.refresh_if_due()
    metrics |= run.publisher.publish()
    return batch, metrics


def learn_from_rows(run: Any) -> tuple[Any, Metrics]:
    """The step of learning from rows: rows → update. Returns the batch and metrics."""
    batch = run.batches.next_batch()
    return batch, run.learner.train(batch)


def learn_from_preferences(run: Any) -> tuple[Any, Metrics]:
    """The step of preference learning: rows → log-probabilities of the reference, or KTO's mean distance to it, if the loss
    needs them → update."""
    batch = run.batches.next_batch()
    if run.learner.needs_reference:
        batch = run.learner.compute_reference(batch)
    if run.learner.needs_baseline:
        batch = run.learner.compute_baseline(batch)
    return batch, run.learner.train(batch)
