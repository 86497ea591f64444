"""What sleeps and wakes under a memory limit: it always fits, and moves little."""

import itertools
import random

import pytest

from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.plan import plan_run
from tandem.flow.sleep_plan import Part, PartCost, SleepPlan, SleepState, StageNeeds, describe_sleep, moved_bytes, sleep_plan
from tandem.models.hardware import Hardware
from tandem.models.shape import Shape
from tests.tiny import tiny_model_folder

CPU = Hardware(kind="cpu", fast_bfloat16=False)
SHAPE = Shape("llama", layers=2, hidden=10, intermediate=30, heads=2, kv_heads=1, head_dim=5, vocab=100, context=64)


def frozen(size: int) -> PartCost:
    return PartCost(size, 0, size)


def trained(size: int) -> PartCost:
    return PartCost(size, size, size)


def p(name: str) -> Part:
    return Part(name, "parameters")


def scoring(sizes: dict[str, int], limit: int | None) -> SleepPlan:
    """Frozen models, each with a stage of its own."""
    stages = tuple(StageNeeds(f"score: {name}", frozenset({p(name)})) for name in sizes)
    return SleepPlan({p(name): frozen(size) for name, size in sizes.items()}, stages, limit)


def test_nothing_sleeps_where_everything_fits_or_nothing_limits():
    for limit in (None, 60):
        plan = scoring({"a": 10, "b": 20, "c": 30}, limit)
        assert not plan.sleeps and moved_bytes(plan.steady()) == 0


def test_the_peak_is_the_largest_reward_model_and_not_their_sum():
    plan = scoring({"a": 10, "b": 20, "c": 30}, 30)
    assert max(done.peak for done in plan.steady()) == 30
    assert moved_bytes(plan.steady()) == 60  # each is read once


def test_what_is_needed_soonest_stays_awake():
    plan = scoring({"a": 10, "b": 10, "c": 10, "d": 10}, 30)
    assert moved_bytes(plan.steady()) < 40  # furthest next use first: some stay over


def test_gradients_and_delivered_weights_cost_room_and_no_movement():
    actor, weights = frozenset({p("actor")}), frozenset({Part("engine", "weights")})
    parts = {p("actor"): trained(10), Part("engine", "weights"): PartCost(10, 0, 10)}
    stages = (
        StageNeeds("generate", weights),
        StageNeeds("update", actor, actor, passing=((Part("actor", "gradients"), 10),)),
        StageNeeds("publish", actor, gives=weights),
    )
    plan = SleepPlan(parts, stages, 20)
    assert [done.peak for done in plan.steady()] == [20, 20, 20]
    assert [done.moves.sleep for done in plan.steady()] == [(), (Part("engine", "weights"),), ()]
    assert moved_bytes(plan.steady()) == 0  # the engine's weights come with the delivery anyway


def random_plan(seed: int) -> SleepPlan:
    """Frozen and trained models, in stages that need one or two of them."""
    draw = random.Random(seed)
    names = "abcde"[: draw.randint(3, 5)]
    parts = {p(name): draw.choice((frozen, trained))(draw.randint(1, 9)) for name in names}
    stages = []
    for number in range(draw.randint(3, 5)):
        needs = frozenset(p(name) for name in draw.sample(names, draw.randint(1, 2)))
        changes = frozenset(part for part in sorted(needs) if parts[part].leaving and draw.random() < 0.7)
        stages.append(StageNeeds(f"s{number}", needs, changes))
    plan = SleepPlan(parts, tuple(stages))
    least, most = plan.least(plan.largest), sum(cost.num_bytes for cost in parts.values())
    return SleepPlan(parts, tuple(stages), draw.randint(least, most))


def fewest_moved(plan: SleepPlan, steps: int) -> int:
    """Bytes that the best of all ways moves in so many steps, by trying all of them."""
    best = {(frozenset(), frozenset(), frozenset()): 0}  # awake, changed, copied
    for stage in plan.stages * steps:
        following: dict[tuple[frozenset[Part], ...], int] = {}
        for (awake, changed, copied), cost in best.items():
            spare = sorted(awake - stage.awake)
            for count in range(len(spare) + 1):
                for asleep in itertools.combinations(spare, count):
                    kept = (awake - set(asleep)) | stage.awake
                    if sum(plan.parts[part].num_bytes for part in kept) > plan.limit:
                        continue
                    state = SleepState(set(awake), set(changed), set(copied))
                    moved = sum(plan.cost(part, state, stage.name)[0] for part in asleep)
                    written = {part for part in asleep if plan.parts[part].leaving}
                    woken = stage.awake - awake
                    moved += sum(plan.parts[q].coming for q in woken if not plan.parts[q].leaving or q in copied)
                    after = (kept, (changed - written) | stage.changes, copied | written)
                    following[after] = min(following.get(after, 10**9), cost + moved)
        best = following
    return min(best.values())


def in_all(plan: SleepPlan, steps: int) -> int:
    return sum(moved_bytes(step) for step in plan.steps(count=steps))


def test_every_stage_has_what_it_needs_within_the_limit_at_near_the_fewest_bytes():
    ours = best = 0
    for seed in range(180):
        plan = random_plan(seed)
        for step in plan.steps(count=4):
            for done in step:
                assert done.stage.awake <= done.awake and done.peak <= plan.limit
        least, found = fewest_moved(plan, 3), in_all(plan, 3)
        assert found >= least
        ours, best = ours + found, best + least
    assert ours <= 1.03 * best


def config_of(tmp_path, *keys):
    model = tiny_model_folder(tmp_path)
    usual = [f"actor.path={model}", "train_dataset.path=addition", "actor.dtype=float32", "rollout.dtype=float32"]
    return load_config(TrainConfig, None, [*usual, "rollout.engine.kv_cache_gib=0.0001", *keys]).config


def plan_of(config) -> SleepPlan | None:
    return sleep_plan(config, plan_run(config), CPU)


def test_a_budget_that_cannot_hold_the_largest_stage_is_refused_with_the_arithmetic(tmp_path):
    config = config_of(tmp_path, "algorithm=ppo", "memory_limit_gib=0.0001")
    words = r"cannot hold the stage 'save'.*actor optimizer .* \+ .*set memory_limit_gib to at"
    with pytest.raises(ConfigError, match=words) as refused:
        plan_of(config)
    enough = str(refused.value).partition("to at least ")[2].partition(",")[0]
    assert plan_of(config_of(tmp_path, "algorithm=ppo", f"memory_limit_gib={enough}")).sleeps


ADAPTERS = ("actor.lora.rank=2", "critic.lora.rank=2")


@pytest.mark.parametrize(
    ("keys", "advice"),
    [
        ((), " (a LoRA actor, a LoRA critic)"),
        (("actor.lora.rank=2",), " (a LoRA critic)"),
        (ADAPTERS, ""),
        (
            ("actor.lora.rank=2", "critic.lora.rank=2", "rollout.engine.kv_cache_gib=1"),
            " (a smaller rollout.engine.kv_cache_gib)",
        ),
    ],
)
def test_what_would_make_the_largest_stage_smaller_is_not_there_already(tmp_path, keys, advice):
    with pytest.raises(ConfigError) as refused:
        plan_of(config_of(tmp_path, "algorithm=ppo", "memory_limit_gib=0.00001", "gconfig.n_samples=128", *keys))
    assert str(refused.value).endswith(f"make the models of that stage smaller{advice}")


def test_a_reference_that_is_the_base_of_the_actor_does_not_sleep_by_itself(tmp_path):
    keys = ["actor.lora.rank=2", "algorithm.kl.coefficient=0.1", "memory_limit_gib=1"]
    plan = plan_of(config_of(tmp_path, *keys))
    assert p("reference") not in plan.parts
    assert p("actor") in plan.stage("reference").awake


def test_what_does_not_sleep_is_refused_with_a_limit(tmp_path):
    for key, words in (
        ("async_training=true", "is for placement=colocate"),
        ("rollout.backend=embedded:2", "is for placement=colocate"),
        ("actor.backend=deepspeed:zero2:d2", "does not go with actor.backend=deepspeed"),
    ):
        with pytest.raises(ConfigError, match=words):
            config_of(tmp_path, "memory_limit_gib=1", key)


def test_a_plan_is_told_stage_by_stage(tmp_path):
    config = config_of(tmp_path, "algorithm=ppo", "algorithm.kl.coefficient=0.1", "memory_limit_gib=0.0009")
    words = describe_sleep(plan_of(config))
    assert "everything awake would take" in words and "A step moves" in words and "(save)" in words
