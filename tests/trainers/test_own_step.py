"""A script gives its own step: the same step is the same run to the bit, and what it adds is in the graph and measured."""

import re
from pathlib import Path

import pytest
import torch

from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.flow.draw import text
from tandem.flow.plan import plan_run
from tandem.flow.stages import TraceError
from tandem.trainers.script import open_training
from tests.matrix.cells import stages_called, step_of

PAGE = Path(__file__).parents[2] / "docs" / "concepts.md"


def from_the_page():
    """`step` and `train_by` as the page has them."""
    (code,) = re.findall(r"```python\n(def step\(run\):.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"open_training": open_training}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["step"], names["train_by"]


def config_of(overrides, trial, *more):
    items = [*overrides, "deterministic=true", f"trial_name={trial}", "total_train_steps=2", "actor.mini_batches=2", *more]
    return load_config(TrainConfig, None, list({item.partition("=")[0]: item for item in items}.values())).config


def trained(config, step, steps=2):
    """The weights after two steps, the stages that were called, and the session."""
    with open_training(config, step=step) as (_, session):
        called = stages_called(session.conductor)
        for _ in range(steps):
            _, metrics = session.step()
            metrics |= session.end_step() | session.timer.metrics()
        return {name: tensor.clone() for name, tensor in session.trainer.weights()}, called, session.plan, metrics


def test_the_step_of_the_page_trains_as_the_command_does_and_is_the_graph_of_its_run(overrides):
    step, train_by = from_the_page()
    own, called, plan, _ = trained(config_of(overrides, "own"), step)
    usual, *_ = trained(config_of(overrides, "usual"), None)
    assert all(torch.equal(own[name], usual[name]) for name in usual)
    assert called == step_of(plan) * 2
    assert [stage.name for stage in called[:5]] == ["generate", "verify", "proximal", "advantages", "update"]
    config = config_of(overrides, "whole")
    train_by(step, config)
    folder = Path(config.run.root) / config.experiment_name / "whole"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2 and (folder / "checkpoints" / "step_2").is_dir()


def test_a_stage_that_a_script_adds_is_shown_timed_and_called(overrides):
    usual, _ = from_the_page()
    config = config_of(overrides, "added", "algorithm.kl.coefficient=0.1")

    def step(run):
        batch = run.rollout.prepare_batch(run.loader, run.workflow)
        batch = run.actor.compute_proximal(run.reference.compute_logprobs(batch))
        run.verifier.verify_if_due(batch)
        metrics = run.actor.ppo_update(batch := run.actor.compute_advantages(batch))
        run.publisher.publish()
        return run.reference.compute_logprobs(batch), metrics  # how far has it moved?

    _, called, plan, metrics = trained(config, step, steps=1)
    assert [stage.name for stage in called].count("reference") == 2 and text(plan).count("reference.compute_logprobs") == 2
    assert metrics["time/train_s"] > 0
    with pytest.raises(ConfigError, match=r"stages that the script's step leaves out: reference") as refused:
        trained(config, usual)
    assert "`tandem train`" in str(refused.value)


def test_a_step_that_reads_values_is_refused_before_there_is_a_run_folder(overrides):
    usual, _ = from_the_page()

    def step(run):
        batch, metrics = usual(run)
        return (batch, metrics) if metrics["loss"] > 0 else (batch, {})

    config = config_of(overrides, "refused")
    with pytest.raises(TraceError, match=r"may not read values: .* KeyError: 'loss'"):
        trained(config, step)
    assert not (Path(config.run.root) / config.experiment_name / "refused").exists()


def test_weights_are_not_published_before_they_are_made_and_rows_have_no_such_step(overrides):
    def early(run):
        batch = run.rollout.prepare_batch(run.loader, run.workflow)
        metrics = run.verifier.verify_if_due(batch) | run.publisher.publish()
        batch = run.actor.compute_advantages(run.actor.compute_proximal(batch))
        return batch, metrics | run.actor.ppo_update(batch)

    with pytest.raises(TraceError, match="publishes weights before it has made them"):
        plan_run(config_of(overrides, "early"), early)
    rows = load_config(SFTConfig, None, ["train_dataset.path=addition"]).config
    for refused in (lambda: plan_run(rows, early), lambda: open_training(rows, step=early)):
        with pytest.raises(ConfigError, match="for training with rewards"):
            refused()
