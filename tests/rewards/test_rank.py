"""A judge that ranks the samples of a prompt."""

import asyncio

import pytest

from tandem.api.failures import RewardFailure
from tandem.api.workflow import Sample
from tandem.config.errors import ConfigError
from tandem.rewards.build import build_reward
from tandem.rewards.judge import Unreadable, read_order
from tests.rewards.asked import ROW, server


def replies(body):
    """The replies that a judge is shown."""
    mark = next(line for line in body["messages"][0]["content"].splitlines() if line.startswith("==="))
    parts = body["messages"][0]["content"].split(f"{mark}\n")
    return [part.partition(":\n")[2].rstrip("\n") for part in parts if part.startswith("Reply ")]


def says(order):
    """A judge whose last line is the order that ``order`` makes of the replies."""
    return lambda body: (200, {"choices": [{"message": {"content": f"Well.\nOrder: {order(replies(body))}"}}]})


def longest_first(texts):
    return " > ".join(str(1 + i) for i in sorted(range(len(texts)), key=lambda i: -len(texts[i])))


def ranked(spec, *texts):
    reward = build_reward(spec, timeout_s=2.0)
    samples = [Sample((), 0.0, completion_text=text, messages=(*ROW["messages"], {"role": "assistant"})) for text in texts]
    try:
        results = asyncio.run(reward.compare(samples, ROW))
    finally:
        reward.close()
    assert all("\nOrder: " in judged.words["rank"] for judged in results)  # kept for the record
    return [judged.rewards["rank"] for judged in results]


def test_a_sample_is_worth_its_place_in_the_order():
    with server(says(longest_first)) as (url, bodies):
        assert ranked(f"rank(url={url}, model=m)", "a", "bbb", "cc") == [0, 1, 0.5]
        first, second = map(replies, bodies)
        assert first == second[::-1] and sorted(first) == ["a", "bbb", "cc"]
        assert ranked(f"rank(url={url}, model=m)", "a", "bbb", "\ud800")[1] == 1  # half a character
    with server(says(lambda texts: ", ".join(str(1 + i) for i in range(len(texts))))) as (url, _):
        assert ranked(f"rank(url={url}, model=m)", "a", "bbb", "cc") == [0.5] * 3  # who favours a place favours nobody


def test_a_large_group_is_ranked_in_even_parts_that_differ_between_votes():
    with server(says(longest_first)) as (url, bodies):
        found = ranked(f"rank(url={url}, model=m, together=3, votes=5)", *("x" * n for n in range(1, 8)))
    parts = [replies(body) for body in bodies]
    assert sorted(map(len, parts)) == [2] * 10 + [3] * 5 and len({frozenset(part) for part in parts}) > 3
    assert found[0] == 0 and found[-1] == 1 and all(0 <= value <= 1 for value in found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2, then 1", "judge_unreadable"),
        ("Order: N > N > N", "judge_unreadable"),
        ("Order: " + "1" * 5000, "judge_unreadable"),
        ("Order: 2 > 3", "judge_omits_reply"),
        ("Order: 2 > 3 > 2 > 1", "judge_repeats_reply"),
        ("Order: 2 > 1 > 4", "judge_unknown_reply"),
        ("Order: 0, 1, 2", "judge_unknown_reply"),
    ],
)
def test_an_order_that_cannot_be_used_is_a_named_failure(text, reason):
    with pytest.raises(Unreadable) as failure:
        read_order(text, 3)
    assert failure.value.reason == reason
    judge = server(lambda body: (200, {"choices": [{"message": {"content": text}}]}))
    with judge as (url, _), pytest.raises(RewardFailure, match="no order with sample 0 can be read") as failure:
        ranked(f"rank(url={url}, model=m)", "a", "b", "c")
    assert failure.value.reason == reason


def test_the_last_order_counts_and_words_around_the_numbers_do_not():
    assert read_order("Order: 1 > 2 > 3\nNo:\n**Order:** Reply 3 > reply 1 > 2.", 3) == [2, 0, 1]


def test_an_order_that_cannot_be_read_costs_its_vote_alone():
    def once(body):
        return (
            200,
            {"choices": [{"message": {"content": f"So\nOrder: {longest_first(replies(body))}" if begun else "no"}}]},
        )

    begun = []

    def then(body):
        answer = once(body)
        begun.append(body)
        return answer

    with server(then) as (url, _):
        assert ranked(f"rank(url={url}, model=m)", "a", "bbb", "cc") == [0, 1, 0.5]
    with server(then) as (url, _), pytest.raises(RewardFailure, match="nobody_to_compare"):
        ranked(f"rank(url={url}, model=m)", "a")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ("together=2", "together must be at least 3"),
        ("votes=0", "votes must be a whole number, at least 1"),
        ("template=FILE", r"lacks \$replies, so nothing is judged"),
    ],
)
def test_a_wrong_knob_of_a_ranking_is_refused_at_start(tmp_path, knobs, said):
    (tmp_path / "mine.txt").write_text("Rank $question")
    with pytest.raises(ConfigError, match=said):
        build_reward(
            f"rank(url='http://127.0.0.1:1', model=m, {knobs.replace('FILE', str(tmp_path / 'mine.txt'))})", timeout_s=1.0
        )
