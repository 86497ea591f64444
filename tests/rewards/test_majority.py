"""The majority of a group's answers: equality decides, not spelling, and the expected answer changes nothing."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.api.failures import RewardFailure
from tandem.api.workflow import Sample
from tandem.rewards.majority import AnswerOnly, MajorityVote

NUMBERS = st.fractions(min_value=-20, max_value=20, max_denominator=4)
ANSWERS = st.lists(st.none() | NUMBERS, min_size=1, max_size=12)
SPELLINGS = [
    str,
    lambda x: f"${x}$",
    lambda x: f" {x} ",
    lambda x: f"{x.numerator * 3}/{x.denominator * 3}",
    lambda x: f"x = {x}",
]


@pytest.fixture(scope="module")
def vote():
    counter = MajorityVote(timeout_s=20.0, workers=1)
    yield lambda answers, expected=None: asyncio.run(counter(answers, expected))
    counter.close()


@given(answers=ANSWERS, spelling=st.lists(st.integers(0, 4), min_size=12, max_size=12), expected=st.none() | NUMBERS)
def test_the_vote_is_that_of_the_values_whatever_their_spelling(vote, answers, spelling, expected):
    texts = [None if a is None else SPELLINGS[how](a) for a, how in zip(answers, spelling, strict=False)]
    found = vote(texts, None if expected is None else str(expected))
    counted = Counter(a for a in answers if a is not None)  # in order of first appearance
    if not counted:
        assert found is None
        return
    majority = max(counted, key=lambda value: counted[value])  # the first of the largest
    assert found.agrees == tuple(a == majority for a in answers)
    assert found.ratio == pytest.approx(counted[majority] / len(answers))
    assert found.right == (None if expected is None else tuple(a == expected for a in answers))
    assert found.undecided == 0


@given(answers=ANSWERS, one=NUMBERS, other=NUMBERS)
def test_the_expected_answer_does_not_move_the_vote(vote, answers, one, other):
    texts = [None if a is None else str(a) for a in answers]
    first, second = vote(texts, str(one)), vote(texts, str(other))
    assert (first is None) == (second is None)
    assert first is None or (first.agrees, first.ratio) == (second.agrees, second.ratio)


@given(answers=ANSWERS.filter(any), seed=st.randoms())
def test_the_vote_goes_with_the_samples_when_they_are_permuted_and_there_is_no_tie(vote, answers, seed):
    largest = Counter(a for a in answers if a is not None).most_common(2)
    if not largest or (len(largest) == 2 and largest[0][1] == largest[1][1]):
        return
    order = list(range(len(answers)))
    seed.shuffle(order)
    texts = [None if a is None else str(a) for a in answers]
    there, here = vote(texts), vote([texts[i] for i in order])
    assert here.agrees == tuple(there.agrees[i] for i in order)


def test_expressions_are_compared_by_their_value(vote):
    found = vote([r"\frac{1}{2}", "3", "0.5", r"\frac{2}{4}", None, "x+1", "1+x"], r"so \boxed{\frac12}")
    assert found.agrees == (True, False, True, True, False, False, False)
    assert found.right == (True, False, True, True, False, False, False)
    assert vote(["x+1", "3", "1+x"]).agrees == (True, False, True)


def test_of_a_tie_the_first_seen_wins_and_one_answer_is_a_majority(vote):
    assert vote(["2", "1", "1", "2"]).agrees == (True, False, False, True)
    assert vote([None, "7", None]).agrees == (False, True, False)
    assert vote([None, None]) is None
    assert vote(["", None]) is None


def test_a_comparison_that_does_not_end_counts_as_unequal_and_is_counted():
    counter = MajorityVote(timeout_s=0.5, workers=1)
    try:
        found = asyncio.run(counter(["9^{9^{9^{9^{9}}}}", "8^{9^{9^{9^{9}}}}", "3"]))
    finally:
        counter.close()
    assert found.agrees == (True, False, False)
    assert found.undecided >= 1


def test_answers_that_cannot_be_compared_do_not_hold_up_the_vote():
    counter, compared = MajorityVote(timeout_s=20.0, workers=1), []

    async def late(arguments):
        compared.append(arguments)
        raise RewardFailure("reward_timeout", "late")

    counter.pool.call = late  # every comparison with a tower is late; the real one takes a deadline each
    towers = [f"{n}^{{9^{{9^{{9}}}}}}" for n in range(2, 34)]
    found = asyncio.run(counter([*towers, "3", "3"], expected=r"\sqrt{2}"))
    assert found.agrees.index(True) == 32 and found.ratio == 2 / 34
    assert len(compared) < 70  # each of 33 answers at most twice, and the expected one twice
    assert found.undecided >= 16


def test_answers_come_from_the_reward_or_else_from_the_text():
    counter = MajorityVote(timeout_s=1.0)
    sample = Sample((), 0.0, completion_text="I say 5")
    assert counter.answer_of(sample) == "5"
    assert counter.answer_of(Sample((), 0.0, completion_text="I say 5", answer=None, extracted=False)) is None
    result = asyncio.run(AnswerOnly()(prompt="", completion="I say 5", prompt_ids=(), completion_ids=(), row={}))
    assert (result.value, result.answer, result.accuracy, result.extracted) == (0.0, "5", None, True)


def test_what_is_plainly_the_same_votes_together_and_units_count():
    vote = asyncio.run(MajorityVote(timeout_s=1.0)(["1,000", "$1000", "2000/2", "5 cm", "5 km"]))
    assert vote.agrees == (True, True, True, False, False)
