"""How the terms of a reward become one number: gates, normalisation, clips, weights, in no order that would matter."""

import asyncio
import random
import statistics
from dataclasses import replace

import pytest
import torch

from tandem.api.failures import DataFailure, WrongWorkflow
from tandem.api.workflow import RewardFn, RewardResult, Sample, Trajectory
from tandem.config.errors import ConfigError
from tandem.config.terms import Options, read_terms
from tandem.rewards.build import build_reward
from tandem.rewards.engine_judge import WritingReward
from tandem.rewards.reward import Reward, RewardTerm, RunningSpread, Scored, Sum

NONE = torch.zeros(3)
TOKENS = Trajectory(NONE.long(), NONE.bool(), NONE, NONE.long())


class Gives(RewardFn):
    """A reward that is what a row says; it counts how often it was asked."""

    def __init__(self, column):
        self.column, self.asked = column, 0

    async def __call__(self, *, row, **rest):
        self.asked += 1
        return RewardResult(row[self.column])


def terms_of(spec):
    """The terms of a sum: those of a model are capitals."""
    scores = {True: WritingReward.__new__(WritingReward), False: None}
    return [RewardTerm(term, term.label, term.options, scores[term.label.isupper()]) for term in read_terms(spec)]


def reward_of(spec, **more):
    """The reward of a run whose terms have all been judged."""
    return Reward(spec, {spec: Sum(terms_of(spec), {}, batch=True, **more)})


def combined(spec, *samples, groups=None, training=True, reward=None):
    """The samples of one batch, each as what its terms gave."""
    terms = read_terms(spec)
    later = [term for term in terms if term.label.isupper() or term.options != Options()]
    scored = []
    for i, values in enumerate(samples):
        cheap = {name: value for name, value in values.items() if not name.isupper()}
        now = {t.label: t.weight * cheap[t.label] for t in terms if t not in later}
        sample = Sample((TOKENS,), sum(now.values()), now, raw_rewards=cheap)
        models = {name: [value] for name, value in values.items() if name.isupper()}
        scored.append(Scored(sample, groups[i] if groups else 0, spec, values=models))
    return (reward or reward_of(spec)).add(scored, training=training)


def rewards(samples):
    return [sample.reward for sample in samples]


def test_a_baseline_beside_samples_that_are_all_the_same_is_no_millionfold_of_them():
    reward, same = reward_of("M(normalise=group)"), [0.1, 0.1, 0.1]
    samples = [Sample((TOKENS,), 0.0, in_statistics=value == 0.1) for value in (*same, 1.0)]
    scored = [
        Scored(one, 0, reward.default, values={"M": [value]}) for one, value in zip(samples, (*same, 1.0), strict=True)
    ]
    assert rewards(reward.add(scored)) == [0.0, 0.0, 0.0, 0.0]
    assert RunningSpread().scale(3.0) == 0.0


def test_a_running_mean_and_spread_are_those_of_all_values_however_divided():
    draw = random.Random(1)
    values = [draw.gauss(5, 3) for _ in range(40)]
    whole, parts = RunningSpread(), RunningSpread()
    whole.add(values)
    for start in range(0, 40, 7):
        parts.add(values[start : start + 7])
    assert parts.mean == pytest.approx(statistics.fmean(values)) == pytest.approx(whole.mean)
    assert whole.scale(8.0) == pytest.approx((8 - statistics.fmean(values)) / statistics.pstdev(values), rel=1e-5)
    assert parts.scale(8.0) == pytest.approx(whole.scale(8.0))
    same = RunningSpread()
    same.add([0.1] * 3)
    assert same.scale(0.1) == pytest.approx(0, abs=1e-9)


def test_each_part_is_normalised_clipped_and_weighed_in_this_order():
    values = [{"A": x, "b": 1.0} for x in (1.0, 2.0, 3.0, 10.0)]
    samples = combined("b + 0.5*A(normalise=running, clip=[-1, 1])", *values)
    spread = statistics.pstdev([1, 2, 3, 10])
    wanted = [max(-1.0, min(1.0, (x - 4) / spread)) for x in (1, 2, 3, 10)]
    assert [s.rewards["A"] for s in samples] == pytest.approx([0.5 * x for x in wanted], rel=1e-5)
    assert rewards(samples) == pytest.approx([1 + 0.5 * x for x in wanted], rel=1e-5)
    assert [s.raw_rewards["A"] for s in samples] == [1, 2, 3, 10]


def test_a_group_is_normalised_by_itself():
    samples = combined("A(normalise=group)", *({"A": x} for x in (1.0, 3.0, 10.0, 30.0, 7.0)), groups=[0, 0, 1, 1, 2])
    assert rewards(samples) == pytest.approx([-1, 1, -1, 1, 0], rel=1e-5)


def test_a_term_counts_only_where_the_other_one_is_above_its_threshold():
    spec = "f + A(gate='f > 0.5')"
    samples = combined(spec, {"f": 1.0, "A": 3.0}, {"f": 0.5, "A": 4.0}, {"f": 0.0})
    assert rewards(samples) == [4.0, 0.5, 0.0]
    assert [s.metrics["gate/A"] for s in samples] == [1.0, 0.0, 0.0]
    assert [s.raw_rewards.get("A") for s in samples] == [3.0, None, None]


def test_a_gate_reads_the_value_before_its_weight():
    assert rewards(combined("0.1*f + A(gate='f > 0.5')", {"f": 1.0, "A": 3.0})) == [pytest.approx(3.1)]


@pytest.mark.parametrize("over", ["running", "group"])
def test_each_step_earns_its_value_at_its_token_and_the_mean_is_recorded(over):
    reward, first = reward_of(f"0.5*S(normalise={over}, clip=[-1, 1])"), replace(TOKENS, input_ids=torch.ones(3).long())
    steps = {(0, 1, 2): [1.0, 2.0, 9.0], (0, 2): [4.0, 0.0]}
    scored = [
        Scored(Sample((first, TOKENS), 0.25), 0, reward.default, values={"S": values}, tokens={"S": list(tokens)})
        for tokens, values in steps.items()
    ]
    samples = reward.add(scored)
    every = [x for values in steps.values() for x in values]
    for sample, (tokens, values) in zip(samples, steps.items(), strict=True):
        wanted = [0.5 * max(-1.0, min(1.0, (x - 3.2) / statistics.pstdev(every))) for x in values]
        assert sample.trajectories[0] is first
        assert sample.trajectories[1].token_rewards[list(tokens)].tolist() == pytest.approx(wanted, rel=1e-5)
        assert sample.rewards["S"] == pytest.approx(sum(wanted), abs=1e-5) == sample.reward - 0.25
        assert sample.raw_rewards == {"S": statistics.fmean(values)}


@pytest.mark.parametrize("over", ["running", "group"])
def test_a_sample_outside_statistics_is_scaled_by_the_others(over):
    reward, given = reward_of(f"A(normalise={over})"), (1.0, 50.0, 3.0)
    samples = [Sample((TOKENS,), 0.0, in_statistics=x < 9) for x in given]
    scored = [Scored(one, 0, reward.default, values={"A": [x]}) for one, x in zip(samples, given, strict=True)]
    assert rewards(reward.add(scored)) == pytest.approx([-1, 48, 1], rel=1e-5)


def test_a_cost_is_a_part_and_not_of_the_sum():
    values = Scored(Sample((TOKENS,), 0.5), 0, "A + 2*C", values={"A": [3.0], "C": [10.0]})
    (sample,) = reward_of("A + 2*C", cost="C").add([values])
    assert sample.reward == 3.5 and sample.rewards == {"A": 3.0, "C": 20.0}


def test_a_running_mean_outlives_a_change_of_terms_if_its_own_term_does():
    before, after = (f"A(normalise=running) + B{knobs}" for knobs in ("(normalise=running)", "(clip=[0, 1])"))
    for again, left in ((False, {"A"}), (True, {"A", "B"})):
        reward = reward_of(before)
        reward.add([Scored(Sample((TOKENS,), 0.0), 0, before, values={"A": [x], "B": [x]}) for x in (1.0, 3.0)])
        reward.change(reward_of(after), again=again)
        assert reward.state_dict() == {"spreads": {name: [2, 2.0, 2.0] for name in sorted(left)}}


def test_the_order_of_terms_changes_no_bit():
    terms = ["0.1*a", "0.7*B(normalise=running)", "0.2*C(clip=[0, 1], gate=a)", "0.3*D(normalise=group)", "1e-9*E"]
    draw = random.Random(0).random
    values = [{name: draw() for name in "aBCDE"} for _ in range(12)]
    found = [
        rewards(combined(" + ".join(order), *values, groups=[i // 4 for i in range(12)]))
        for order in (terms, terms[::-1], [*terms[2:], *terms[:2]])
    ]
    assert found[0] == found[1] == found[2]


def test_what_goes_on_from_a_checkpoint_is_what_was_never_interrupted():
    spec, draw = "A(normalise=running) + b(normalise=running)", random.Random(0).random
    batches = [[{"A": draw(), "b": draw()} for _ in range(5)] for _ in range(4)]
    whole, first, second = (reward_of(spec) for _ in range(3))
    expected = [rewards(combined(spec, *batch, reward=whole)) for batch in batches]
    for batch in batches[:2]:
        combined(spec, *batch, reward=first)
    second.load_state_dict(first.state_dict())
    assert [rewards(combined(spec, *batch, reward=second)) for batch in batches[2:]] == expected[2:]


def test_evaluation_normalises_nothing_and_learns_nothing():
    spec = "0.5*A(normalise=running, clip=[-1, 1]) + B(clip=[-1, 1])"
    reward = reward_of(spec)
    assert rewards(combined(spec, {"A": 8.0, "B": 3.0}, training=False, reward=reward)) == [5.0]
    assert reward.state_dict() == {"spreads": {}}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_a_value_that_is_not_finite_costs_its_sample_and_no_mean(value):
    spec = "A(normalise=running)"
    reward = reward_of(spec)
    found = combined(spec, {"A": 1.0}, {"A": value}, {"A": 3.0}, reward=reward)
    assert isinstance(found[1], DataFailure) and found[1].reason == "reward_not_finite"
    assert reward.state_dict() == {"spreads": {"A": [2, 2.0, 2.0]}}


def test_a_workflow_that_drops_what_the_reward_said_is_told_so():
    with pytest.raises(WrongWorkflow, match=r"reward 'a' has options, .* without its value"):
        combined("a(clip=[0, 1])", {})


def asked(spec, rows, batch=False, **terms):
    given = {name: Gives(name) for name in terms or rows[0]}
    reward = Sum(terms_of(spec), given, batch=batch)
    ids = {"prompt": "", "completion": "", "prompt_ids": (), "completion_ids": ()}
    return [asyncio.run(reward(row=row, **ids)) for row in rows], {name: g.asked for name, g in given.items()}


@pytest.mark.parametrize("later", [False, True])
def test_an_answer_that_fails_the_gate_is_not_sent_to_the_judge(later):
    rows = [{"f": 0.0, "g": 5.0, "j": 9.0}, {"f": 1.0, "g": 5.0, "j": 9.0}, {"f": 1.0, "g": 0.0, "j": 9.0}]
    results, calls = asked("j(gate=g) + g(gate='f > 0.5') + 0*f", rows, later)
    assert calls == {"f": 3, "g": 2, "j": 1}
    assert [r.value for r in results] == ([0.0] * 3 if later else [0.0, 14.0, 0.0])
    assert [r.raw_rewards.get("j") for r in results] == [None, 9.0, None]


def test_a_rule_of_a_single_sample_needs_no_batch_and_a_running_mean_does():
    assert asked("a(clip=[0, 1]) + 2*b", [{"a": 5.0, "b": 3.0}])[0][0].rewards == {"a": 1.0, "b": 6.0}
    with pytest.raises(ConfigError, match="normalise=running of math needs the batches of `tandem train`"):
        build_reward("math(normalise=running)", timeout_s=1.0)


def test_the_accuracy_of_a_sum_is_that_of_the_first_term_that_has_one():
    class Knows(Gives):
        async def __call__(self, *, row, **rest):
            return RewardResult(0.0, accuracy=row[self.column])

    judges = {"a": Gives("a"), "b": Knows("b"), "c": Knows("c")}
    ids = {"prompt": "", "completion": "", "prompt_ids": (), "completion_ids": ()}
    result = asyncio.run(Sum(terms_of("a + b + c"), judges)(row={"a": 0.25, "b": 1.0, "c": 0.0}, **ids))
    assert result.accuracy == 1.0


def test_an_answer_shorter_than_its_target_earns_no_more_than_1():
    reward = build_reward("length(target_tokens=4)", timeout_s=1.0)
    ids = {"prompt": "", "completion": "", "prompt_ids": (), "row": {}}
    values = [asyncio.run(reward(completion_ids=(1,) * n, **ids)).value for n in (0, 2, 4, 6, 8, 9)]
    assert values == [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]


def test_any_term_may_have_a_name_of_its_own():
    reward = build_reward("math(name=right) + 0.1*length(target_tokens=8, name=short)", timeout_s=1.0)
    result = asyncio.run(reward(prompt="", completion="4", prompt_ids=(), completion_ids=(1, 2), row={"answer": "4"}))
    reward.close()
    assert set(result.rewards) == {"right", "short"} and result.accuracy == 1.0


def test_a_score_of_steps_that_finds_none_is_a_failure_of_that_sample_alone():
    samples = [
        Scored(Sample((TOKENS,), 0.0), 0, "M", values={"M": values}, tokens={"M": [2] * len(values)})
        for values in ([], [1.0])
    ]
    failed, fine = reward_of("M").add(samples)
    assert str(failed) == "no_steps: reward 'M' scores steps and found none in the reply"
    assert fine.reward == 1.0
