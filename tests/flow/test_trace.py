"""The graph of a run is what its step traces to: in which order, what for, and what a step may not ask."""

import pytest

from tandem.api.batch import Declaration
from tandem.flow.stages import Handle, Role, TraceError, trace
from tandem.flow.step import learn_from_rewards
from tests.flow.test_plan import plan_of

CRITIC = ("algorithm=ppo", "critic.warmup_steps=4", "algorithm.kl.coefficient=0.1", "reference.refresh_every_steps=2")


def roles_of(*keys):
    return plan_of(*keys).roles


def named(stages):
    return [stage.name for stage in stages]


def test_a_stage_that_a_user_adds_to_a_step_is_in_its_trace():
    roles = roles_of("algorithm.kl.coefficient=0.1")

    def step(run):
        batch = run.rollout.prepare_batch(run.loader, run.workflow)
        batch = run.reference.compute_logprobs(batch)
        batch = run.reference.compute_logprobs(batch=batch)
        run.publisher.publish()
        return batch, {}

    stages = list(trace(step, roles))
    assert named(stages) == ["generate", "reference", "reference", "publish"]
    assert [stage.awake for stage in stages] == [("engine",), ("reference",), ("reference",), ("actor", "engine")]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda run, batch: batch["reward"], "may not read the values of a batch"),
        (lambda run, batch: bool(batch), "may not read the values of a batch"),
        (lambda run, batch: batch.mean(), "may not read the values of a batch"),
        (lambda run, batch: batch.update({}), "may not read the values of a batch"),
        (lambda run, batch: run.verifier.verify_if_due(batch)["gap/mean"], "may not read a metric .gap/mean."),
        (
            lambda run, batch: ({} | run.verifier.verify_if_due(batch))["gap/mean"],
            "may not read values: .* KeyError",
        ),
        (lambda run, batch: run.actor.compute_proximal(), "actor.compute_proximal was given no batch"),
        (lambda run, batch: run.saver.save(), "has no attribute 'saver'"),
        (lambda run, batch: None, "return batch, metrics"),
        (lambda run, batch: run.actor.ppo_update(batch), "actor.ppo_update reads advantages, dropped, shaped_reward, which"),
    ],
)
def test_a_step_that_asks_for_a_value_or_comes_too_early_is_refused_by_its_trace(ask, says):
    def step(run):
        ask(run, run.rollout.prepare_batch(run.loader, run.workflow))

    with pytest.raises(TraceError, match=says):
        list(trace(step, [role for role in roles_of() if role.name != "saver"]))


def test_what_is_no_stage_of_a_role_is_named_with_those_that_are():
    handle = Handle(Role("actor", {"ppo_update": Declaration("ppo_update")}, constants={"needs_proximal": True}), None)
    assert handle.needs_proximal is True
    with pytest.raises(
        AttributeError, match="actor has no 'version' that a step can use; it has needs_proximal, ppo_update"
    ):
        handle.version  # noqa: B018


def test_the_update_is_in_the_graph_although_the_actor_rests_at_first():
    stages = list(trace(learn_from_rewards, roles_of(*CRITIC)))
    assert named(stages)[-4:] == ["update", "update values", "refresh", "publish"]
    assert stages[-4].when == "the actor is not trained in the first 4 steps"


def test_weights_are_published_after_the_update_that_made_them():
    stages = list(trace(learn_from_rewards, roles_of(*CRITIC)))
    writes = {stage.name: set(stage.declared.writes_state) for stage in stages}
    order = named(stages)
    assert "weights" in writes["update"] and order.index("update") < order.index("refresh") < order.index("publish")


def test_scores_of_models_are_called_inside_of_collecting():
    stages = plan_of("reward=math + 0.5*model(path=some/judge, name=helpful)").stages
    assert named(stages)[:2] == ["generate", "score: helpful"] and [one.inside for one in stages[:2]] == [False, True]
    assert stages[1].kind == "score" and stages[1].added == ("rewards/helpful",) and stages[1].awake == ("helpful",)


def test_a_penalty_comes_after_the_multiplier_has_followed_the_cost():
    order = named(plan_of("reward=math + model(path=some/judge, name=cost)", "constraint.cost=cost").stages)
    assert order.index("multiplier") + 1 == order.index("penalty") < order.index("advantages")
