"""A judge that compares the samples of a prompt."""

import asyncio
import json

import pytest

from tandem.api.failures import RewardFailure
from tandem.api.workflow import Sample
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.rewards.build import build_reward
from tandem.trainers.loop import train
from tests.rewards.asked import ROW, server
from tests.tiny import tiny_model_folder


def replies(body):
    """The two replies that a judge is shown."""
    asked = body["messages"][0]["content"]
    mark = asked[asked.index("===") :].partition("\n")[0].removesuffix(". ")
    mark = f"=== {mark.split()[1]} ==="
    first, second = (asked.partition(f"{mark}\nReply {name}:\n")[2].partition(f"\n{mark}")[0] for name in "AB")
    return first, second


def says(verdict):
    """A judge whose last line is what ``verdict`` makes of the two replies."""
    return lambda body: (200, {"choices": [{"message": {"content": f"Well.\n{verdict(*replies(body))}"}}]})


def longer(first, second):
    better = "A" if len(first) > len(second) else "B" if len(second) > len(first) else "tie"
    return f"Verdict: {better}"


def compared(spec, *texts):
    reward = build_reward(spec, timeout_s=2.0)
    samples = [Sample((), 0.0, completion_text=text, messages=(*ROW["messages"], {"role": "assistant"})) for text in texts]
    try:
        return [judged.rewards["compare"] for judged in asyncio.run(reward.compare(samples, ROW))]
    finally:
        reward.close()


def test_a_sample_is_worth_the_share_of_its_comparisons_that_it_wins():
    with server(says(longer)) as (url, bodies):
        assert compared(f"compare(url={url}, model=m, opponents=3)", "a", "bb", "ccc", "ccc") == [0, 1 / 3, 5 / 6, 5 / 6]
        assert len(bodies) == 12  # six pairs, each in both orders
        assert compared(f"0.5*compare(url={url}, model=m, opponents=1)", "a", "bb", "ccc") == [0, 0.25, 0.5]


OWN = """
import asyncio, sys, time
from pathlib import Path
from tandem import GroupReward, RewardResult

class Odd(GroupReward):
    async def compare(self, samples, row):
        what = samples[0].completion_text
        if what == "waits":
            await asyncio.sleep(3600)
        if what == "blocks":
            while not Path(__file__).with_name("stop").exists():
                time.sleep(0.05)
        if what == "raises":
            raise ValueError("no")
        if what == "exits":
            sys.exit(3)
        return [RewardResult(float(i), words={"odd": sample.completion_text}) for i, sample in enumerate(samples)]
"""


def test_a_users_comparison_that_hangs_fails_at_its_deadline_and_the_next_is_judged(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    reward = build_reward(f"{tmp_path}/mine.py:Odd", timeout_s=0.3)

    async def ask(*texts):
        return await reward.compare([Sample((), 0.0, completion_text=text) for text in texts], ROW)

    async def all_of_them():
        waits, fine = await asyncio.gather(ask("waits"), ask("a", "b"), return_exceptions=True)
        blocks = await asyncio.gather(ask("blocks"), return_exceptions=True)
        others = await asyncio.gather(ask("raises"), ask("exits"), return_exceptions=True)
        return [waits, *blocks, *others], fine, await ask("c")

    failures, fine, later = asyncio.run(all_of_them())
    reward.close()
    (tmp_path / "stop").touch()  # the one that blocks has blocked till here
    assert [failure.reason for failure in failures] == ["reward_timeout"] * 2 + ["reward_raised"] * 2
    assert [(one.reward, one.words) for one in fine] == [(0.0, {"odd": "a"}), (1.0, {"odd": "b"})] and len(later) == 1


def test_a_judge_that_favours_a_place_favours_nobody():
    with server(says(lambda first, second: "Verdict: A")) as (url, _):
        assert compared(f"compare(url={url}, model=m)", "a", "bb", "ccc") == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("verdict", "texts", "reason"),
    [("I like both", "ab", "judge_unreadable"), ("Verdict: A", "a", "nobody_to_compare")],
)
def test_a_group_that_cannot_be_compared_fails_by_name(verdict, texts, reason):
    with server(says(lambda first, second: verdict)) as (url, _), pytest.raises(RewardFailure) as failure:
        compared(f"compare(url={url}, model=m)", *texts)
    assert failure.value.reason == reason


def test_a_run_trains_on_comparisons_beside_other_rewards(tmp_path):
    keys = [f"actor.path={tiny_model_folder(tmp_path)}", "actor.dtype=float32", "train_dataset.path=addition"]
    keys += ["gconfig.n_samples=4", "gconfig.max_new_tokens=8", "rollout.batch_size=2", "rollout.engine.threads=1"]
    keys += [f"run.root={tmp_path}", "tracking.trajectories_per_step=99", "evaluate.every_steps=null", "total_train_steps=1"]
    with server(says(longer)) as (url, _):
        spec = f"length(target_tokens=4) + 2*compare(url={url}, model=m, opponents=3)"
        summary = train(load_config(TrainConfig, None, [*keys, f"reward={spec}"]))
    samples = [json.loads(line) for line in (summary.folder / "trajectories/step_1.jsonl").read_text().splitlines()]
    for number in {sample["group"] for sample in samples}:
        group = [sample for sample in samples if sample["group"] == number]
        worth = [sample["rewards"]["compare"] for sample in group]
        assert sum(worth) == pytest.approx(4) and all(0 <= value <= 2 for value in worth)
        lengths = [len(sample["completion"]) for sample in group]
        assert worth[lengths.index(max(lengths))] == max(worth)
        assert all(s["judges"]["compare"].count("Well.\nVerdict: ") == 6 for s in group)  # 3 opponents, both orders
        assert all(s["reward"] == pytest.approx(sum(s["rewards"].values())) for s in group)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["gconfig.n_samples=1", "algorithm=reinforce"], "so gconfig.n_samples must be at least 2, got 1"),
        (["algorithm.advantage=remax"], "the greedy baseline of algorithm.advantage=remax is not compared with"),
        (["evaluate.every_steps=1"], "evaluation judges them one by one"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused_at_start(tmp_path, keys, said):
    base = [f"actor.path={tiny_model_folder(tmp_path)}", "train_dataset.path=addition", f"run.root={tmp_path}/runs"]
    reward = "reward=compare(url='http://127.0.0.1:1', model=m)"
    with pytest.raises(ConfigError, match=said):
        train(load_config(TrainConfig, None, [*base, "evaluate.every_steps=null", reward, *keys]))
    assert not (tmp_path / "runs").exists()


def test_a_wrong_knob_of_a_comparison_is_refused_at_start():
    with pytest.raises(ConfigError, match="opponents must be a whole number, at least 1"):
        build_reward("compare(url='http://127.0.0.1:1', model=m, opponents=0)", timeout_s=1.0)
