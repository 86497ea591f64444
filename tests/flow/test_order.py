"""The graph of a step is right by its edges: which stage waits for which, and why."""

from tandem.flow.draw import edges, pools_of
from tests.flow.test_plan import plan_of

PPO = ("algorithm=ppo", "algorithm.kl.coefficient=0.1", "reference.refresh_every_steps=2")


def ties(*keys):
    return {(before, after): by for before, after, by in edges(plan_of(*keys))}


def test_weights_go_out_after_the_update_that_made_them_and_are_read_before_it():
    found = ties(*PPO, "rollout.verify.every_steps=3")
    assert found["update", "publish"] == "actor.weights" and found["generate", "publish"] == "engine.weights"
    assert found["verify", "update"] == "actor.weights", "what reads the old weights comes before"
    assert found["update", "refresh"] == "actor.weights" and found["reference", "refresh"] == "reference.weights"
    assert found["update", "save"] == "actor.weights" and ("publish", "refresh") not in found


def test_the_graph_of_ppo_is_that_of_realhf():
    """Its paper's figure: generation, then reward, reference and values side by side, then both updates."""
    plan = plan_of(*PPO, "reward=model(path=tiny-reward)")
    by_stage = {(before, after) for before, after, _ in edges(plan)}
    inference = ("reference", "values")
    assert {("generate", name) for name in inference} <= by_stage
    assert not {pair for pair in by_stage if pair[0] in inference and pair[1] in inference}, "nothing ties them"
    assert {(name, "advantages") for name in inference} <= by_stage
    assert {("advantages", "update"), ("advantages", "update values")} <= by_stage
    assert ("update", "update values") not in by_stage and ("update values", "update") not in by_stage
    assert [stage.inside for stage in plan.stages].index(True) == 1, "the score is a part of generating"
    pools = pools_of(plan)
    assert len({pools[role] for role in ("rollout", "actor", "critic", "reference")}) == 4


def test_penalties_wait_for_the_multiplier_by_the_pool_and_for_costs_by_their_field():
    plan = plan_of("reward=math + length", "constraint.cost=length", "constraint.limit=1")
    stages = [stage for stage in plan.stages if stage.role == "constraint"]
    assert [stage.call for stage in stages] == ["follow", "penalise"] and pools_of(plan)["constraint"] == "actor"
    assert all("rewards/" in stage.declared.may_read for stage in stages)
    assert ("penalty", "advantages", "reward") in set(edges(plan))


def test_a_reference_without_a_memory_of_its_own_never_runs_beside_its_actor():
    plan = plan_of("actor.lora.rank=4", "algorithm.kl.coefficient=0.1")
    assert pools_of(plan)["reference"] == pools_of(plan)["actor"] == "actor"
    assert ("reference", "update", "actor.weights") in set(edges(plan))
