"""The rewards that come with Tandem: values, and texts made to fool or to stall them."""

import asyncio
import time
from fractions import Fraction

import pytest

from tandem.api.failures import RewardFailure
from tandem.rewards.build import build_reward
from tandem.rewards.reading import boxed, final_answer, gold_answer, last_number, plain_number


def judge(spec, completion, answer="18", timeout_s=20.0, **row):
    reward = build_reward(spec, timeout_s=timeout_s)
    try:
        given = {"prompt": "#### 18", "completion": completion, "prompt_ids": (1,), "completion_ids": tuple(range(30))}
        return asyncio.run(reward(**given, row={"answer": answer, **row}))
    finally:
        reward.close()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} and #### 7", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{\text{two}_{2}}", r"\text{two}_{2}"),
        (r"\boxed{3} and cut \boxed{4", "3"),
        ("He has 3.\n#### 1,234\nbye 9", "1,234"),
        ("12 + 7 = 19.", "19"),
        ("It is -3", "-3"),
        ("5-2", "5-2"),
        ("costs $1,250.50 in all", "$1,250.50"),
        ("12cm", "12cm"),
        ("no number", None),
        ("", None),
        ("####", None),
    ],
)
def test_the_final_answer_is_the_box_else_after_hashes_else_what_is_stated(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("$18.00", 18),
        ("-1,234.50", Fraction("-1234.5")),
        ("3/4", Fraction(3, 4)),
        ("18 dollars", 18),
        ("x = 18", 18),
        ("the answer is: x = -18 dollars.", -18),
        ("answer:18", 18),
        ("total  =  18", 18),
        ("total =", None),
        ("$18$", 18),
        (".5", Fraction(1, 2)),
        ("18.", 18),
        ("18x", None),
        ("18 x", None),
        ("18 million", 18_000_000),
        ("1/0", None),
        ("2^10", None),
        ("50%", Fraction(1, 2)),
        ("1e999999999", None),
        ("9" * 5000, None),
        ("", None),
        ("-", None),
    ],
)
def test_plain_numbers_are_exact_and_anything_else_is_none(text, value):
    assert plain_number(text) == value


def test_the_gold_answer_may_stand_in_a_solution():
    assert gold_answer("72 clips in May.\n#### 72") == "72"
    assert gold_answer(r"hence $\boxed{x^2}$.") == "x^2"
    assert gold_answer(r" \frac{3}{4} ") == r"\frac{3}{4}"
    assert gold_answer(18) == "18"


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 30000,
        "{" * 50000,
        "1,000" * 20000,
        "9" * 100000,
        "#" * 100000,
        "1." * 50000,
        "-$" * 50000,
        " a" * 50000,
        "#### " + "=  " * 60 + "( (",
        "#### 1 a\n" * 10000,
        "the answer is " * 10000,
        "is: = " * 20000 + "\n" + "$" * 50000,
        "1 " * 50000,
        "10^{" * 30000,
        "\\frac{1}" * 20000,
        "\\text{" * 20000 + "5 cm",
        "sqrt(" * 20000,
        "#### " + "ab  " * 45 + "( (",
        "#### " + "ab  =  " * 25 + "( (",
    ],
)
def test_extraction_is_fast_on_texts_made_to_stall_it(text):
    start = time.process_time()
    boxed(text), last_number(text), plain_number(final_answer(text) or "")
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("The answer is #### 18", "9 * 2 = 18\n#### 18", 1.0),
        (r"\boxed{18.0}", "18", 1.0),
        ("I think 17", "18", 0.0),
        ("no idea", "18", 0.0),
        ("", "18", 0.0),
        (r"\boxed{\frac{2}{4}}", r"\frac12", 1.0),
        (r"\boxed{1+x}", "x+1", 1.0),
        (r"\boxed{x+2}", "x+1", 0.0),
        (r"\boxed{(1, 2]}", "(1, 2]", 1.0),
        (r"\boxed{}}{\frac{", r"\frac{1}{2}", 0.0),
    ],
)
def test_math_is_mathematical_equality(completion, answer, value):
    result = judge("math", completion, answer)
    assert (result.value, result.accuracy) == (value, value)


def test_plain_numbers_need_no_worker():
    reward = build_reward("math", timeout_s=1.0)
    asyncio.run(reward(prompt="", completion="#### 18", prompt_ids=(), completion_ids=(), row={"answer": "18"}))
    assert reward.pool.pids == []


def test_a_power_tower_is_killed_and_does_not_hold_up_others():
    reward = build_reward("math", timeout_s=3.0)

    async def one(completion, answer):
        return await reward(prompt="", completion=completion, prompt_ids=(), completion_ids=(), row={"answer": answer})

    async def all_of_them():
        tower = asyncio.create_task(one(r"\boxed{9^{9^{9^9}}}", "10"))
        values = await asyncio.gather(*(one(r"\boxed{\sqrt{4}}", str(n)) for n in (2, 3)))
        with pytest.raises(RewardFailure) as caught:
            await tower
        return [value.value for value in values], caught.value.reason

    try:
        assert asyncio.run(all_of_them()) == ([1.0, 0.0], "reward_timeout")
    finally:
        reward.close()


@pytest.mark.parametrize(("completion", "value"), [("7 + 11 = 18", 1.0), ("18.0", 1.0), ("18 or 19", 0.0), ("none", 0.0)])
def test_exact_number_compares_the_last_number(completion, value):
    assert judge("exact_number", completion).value == value


def test_a_row_without_an_answer_is_a_failure_and_not_a_zero():
    for spec in ("math", "exact_number", "gsm8k"):
        with pytest.raises(RewardFailure, match="there is none"):
            judge(spec, "18", answer=None)
    with pytest.raises(RewardFailure, match="holds none"):
        judge("exact_number", "18", answer="x")


def test_form_is_judged_on_the_completion_only():
    assert judge("format", "18").value == 0.0  # the prompt shows "#### 18"
    assert judge("format", "#### 18").value == judge("format", r"\boxed{18}").value == 1.0
    assert judge("format", "####").value == 0.0


def test_gsm8k_gives_a_spread():
    right, near, far, unmarked, none = (judge("gsm8k", c) for c in ("#### 18", "#### 17", "#### 1800", "18", "none"))

    assert right.value == pytest.approx(1.5) and right.accuracy == 1.0
    assert right.rewards == pytest.approx({"correct": 1.0, "closeness": 0.3, "format": 0.2})
    assert right.value > unmarked.value > near.value > far.value > none.value == 0.0


def test_length_falls_to_zero_at_twice_the_target():
    assert [judge(f"length(target_tokens={n})", "x").value for n in (30, 20, 15, 10)] == [1.0, 0.5, 0.0, 0.0]


def test_a_sum_has_weighted_named_parts():
    result = judge("math + 0.2*format", "#### 18")
    assert result.value == pytest.approx(1.2) and result.accuracy == 1.0
    assert result.rewards == pytest.approx({"math": 1.0, "format": 0.2})


def test_reasoning_gym_uses_the_librarys_scorer():
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="optional library reasoning-gym is not installed")
    row = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    answer = row.pop("answer")

    reward = build_reward("reasoning_gym", timeout_s=60.0)

    def score(completion, **columns):
        given = {"prompt": "", "completion": completion, "prompt_ids": (), "completion_ids": ()}
        return asyncio.run(reward(**given, row={"answer": answer, **columns}))

    try:
        assert score(f"so <answer>{answer}</answer>", **row).accuracy == 1.0
        assert score("<answer>1234567</answer>", **row).accuracy == 0.0
        with pytest.raises(RewardFailure, match="source_dataset"):
            score("1")
    finally:
        reward.close()
