"""Rewards with the signatures of published ones, by TRL's and verl's authors and users, judge a run unchanged.

Each is this test's own form of a function that is named beside it.
"""

import inspect
import itertools
import math
import re
import sys

import cloudpickle
import yaml

import tandem
from tandem import load_trajectories

ROWS = [
    {"question": f"{a}+{b}=", "answer": str(a + b), "solution": f"${a + b}$", "data_source": "sums", "extra_info": {"a": a}}
    for a in range(6)
    for b in range(6)
]


def reward_len(completions, **kwargs):  # TRL's quick start
    return [-abs(20 - len(completion)) / 100 for completion in completions]


def reward_ids(completion_ids, **kwargs):  # the first one of TRL's page of GRPO
    return [float(len(ids)) for ids in completion_ids]


def reward_special(prompts, completions, answer, trainer_state=None, log_extra=None, **kwargs):  # TRL's page, with a column
    log_extra("seen", answer)
    return [
        1.0 if right in text else 0.5 if prompt else None
        for prompt, text, right in zip(prompts, completions, answer, strict=True)
    ]


async def reward_async(prompts, completions, **kwargs):  # TRL: asynchronous rewards
    return [float(len(set(text))) for text in completions]


class SoftOverlong:  # TRL: get_soft_overlong_punishment
    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, most, cache):
        self.most, self.cache = most, cache

    def __call__(self, completion_ids, **kwargs):
        return [min(0.0, max(-1.0, (self.most - self.cache - len(ids)) / self.cache)) for ids in completion_ids]


def format_reward(completions, **kwargs):  # open-r1: chats
    texts = [completion[0]["content"] for completion in completions]
    return [float(bool(re.match(r"^<think>\n.*?\n</think>", text, re.DOTALL))) for text in texts]


def tag_count_reward(completions, **kwargs) -> list[float]:  # open-r1
    return [0.25 * sum(c[0]["content"].count(tag) for tag in "aeio") for c in completions]


def reasoning_steps_reward(completions, **kwargs):  # open-r1
    return [min(1.0, len(re.findall(r"\n|\d", completion[0]["content"])) / 3) for completion in completions]


def cosine_scaled(max_len=100):  # open-r1: a closure, and a column called solution
    def cosine_scaled_reward(completions, solution, **kwargs):
        texts = [completion[0]["content"] for completion in completions]
        return [
            math.cos(math.pi * len(t) / max_len) * (1 if s.strip("$") in t else -1)
            for t, s in zip(texts, solution, strict=True)
        ]

    return cosine_scaled_reward


def repetition_penalty(size, most):  # open-r1: get_repetition_penalty_reward
    def repetition_penalty_reward(completions, **kwargs) -> float:
        texts = [list(completion[0]["content"]) for completion in completions]
        return [most * (1 - len({*itertools.pairwise(t)}) / max(1, len(t) - 1)) if len(t) > size else 0.0 for t in texts]

    return repetition_penalty_reward


def gsm8k(solution_str, ground_truth, method="strict", format_score=0.1, score=1.0):  # verl: reward_score/gsm8k.py
    numbers = re.findall(r"-?\d+", solution_str)
    return 0 if not numbers else score if method == "strict" and numbers[-1] == ground_truth else format_score


def math_dapo(solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index=None) -> float:
    right = solution_str[-300:].strip() == ground_truth  # verl: reward_score/math_dapo.py, a dict
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}


def my_reward_fn(data_source, solution_str, ground_truth, extra_info=None):  # verl: custom_reward_function
    return len(solution_str) / 100 + (data_source == "sums") + extra_info["a"] + float(ground_truth)


REWARDS = [
    *(reward_len, reward_ids, reward_special, reward_async, SoftOverlong(8, 4)),
    *(format_reward, tag_count_reward, reasoning_steps_reward, cosine_scaled(), repetition_penalty(2, -1.0)),
    *(gsm8k, math_dapo, my_reward_fn),
]
CHATS = {"format_reward", "tag_count_reward", "reasoning_steps_reward", "cosine_scaled_reward", "repetition_penalty_reward"}


def as_its_authors_call_it(function, row, text, count):
    """The reward of one answer, by TRL's or verl's own convention."""
    names = inspect.signature(function).parameters
    if "solution_str" in names:
        given = {"solution_str": text, "ground_truth": row["answer"], **{n: row[n] for n in ("data_source", "extra_info")}}
        found = function(**{name: given[name] for name in names if name in given})
        return found["score"] if isinstance(found, dict) else found
    said = [{"role": "assistant", "content": text}] if function.__name__ in CHATS else text
    lists = {"prompts": [row["question"]], "completions": [said], "completion_ids": [[0] * count]}
    lists |= {name: [value] for name, value in row.items()}
    return function(**lists, log_extra=lambda *_: None)[0]


def test_thirteen_rewards_of_trl_and_verl_judge_a_run_as_their_authors_would(overrides, tmp_path):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the functions of a notebook travel
    pairs = (item.partition("=")[::2] for item in overrides)
    keys = {key: yaml.safe_load(value) for key, value in pairs if key not in ("reward", "train_dataset.path")}
    keys |= {"total_train_steps": 1, "tracking.trajectories_per_step": None}
    done = tandem.GRPOTrainer(reward_funcs=REWARDS, train_dataset=ROWS, options=keys).train()
    rows, seen = {row["question"]: row for row in ROWS}, 0
    for record in load_trajectories(done.folder, 1, tensors=False):
        row = next(row for question, row in rows.items() if question in record.prompt)
        for function in REWARDS:
            if function is reward_async:
                expected = len(set(record.completion))
            else:
                expected = as_its_authors_call_it(function, row, record.completion, record.tokens)
            assert math.isclose(record.rewards[function.__name__], expected, abs_tol=1e-6), function.__name__
            seen += 1
    assert seen == 16 * len(REWARDS)
