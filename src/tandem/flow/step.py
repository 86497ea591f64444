"""The step of every kind of training, in plain code.

A step gets the run as handles of its roles. Called by the loop it trains; traced, it is the graph of the run
(`tandem.flow.stages`). So it asks nothing but whether a role is there, or what is constant of it.
"""

from typing import Any

Metrics = dict[str, float]


def learn_from_rewards(run: Any) -> tuple[Any, Metrics]:
    """generate → reward → advantage → loss → update → publish. Returns the batch with all its fields, and metrics."""
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
    """rows → update."""
    batch = run.batches.next_batch()
    return batch, run.learner.train(batch)


def learn_from_preferences(run: Any) -> tuple[Any, Metrics]:
    """rows → reference, or its mean distance → update."""
    batch = run.batches.next_batch()
    if run.learner.needs_reference:
        batch = run.learner.compute_reference(batch)
    if run.learner.needs_baseline:
        batch = run.learner.compute_baseline(batch)
    return batch, run.learner.train(batch)
