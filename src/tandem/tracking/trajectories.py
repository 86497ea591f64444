"""A few samples of each step as text, so that one can read what the model is doing."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tandem.api.requests import StopReason
from tandem.api.samples import Group, Sample
from tandem.api.weights import WeightVersion


def _version_runs(sample: Sample, history: Mapping[int, WeightVersion]) -> list[list[dict[str, Any]]]:
    """For each trajectory, which weights made how many of its trained tokens, in order."""
    found = []
    for trajectory in sample.trajectories:
        runs: list[dict[str, Any]] = []
        for number in trajectory.versions[trajectory.loss_mask].tolist():
            if not runs or runs[-1]["version"] != number:
                digest = history[number].digest if number in history else ""
                runs.append({"version": number, "tokens": 0} | ({"digest": digest} if digest else {}))
            runs[-1]["tokens"] += 1
        found.append(runs)
    return found


def describe_sample(group: Group, index: int, history: Mapping[int, WeightVersion]) -> dict[str, Any]:
    sample = group.samples[index]
    return {
        "group": group.group_id,
        "sample": index,
        "source": group.source,
        "prompt": sample.prompt_text,
        "completion": sample.completion_text,
        "answer": group.data.get("answer"),
        "reward": sample.reward,
        "rewards": dict(sample.rewards),
        "accuracy": sample.accuracy,
        "tokens": sample.num_trained_tokens,
        "stop_reason": [StopReason(trajectory.stop_reason).name.lower() for trajectory in sample.trajectories],
        "versions": _version_runs(sample, history),
    }


def choose(groups: Iterable[Group], count: int) -> list[tuple[Group, int]]:
    """Up to `count` samples: the best and the worst of each group, the pair that taught most, then the groups' others."""
    pairs, others = [], []
    for group in groups:
        order = sorted(range(len(group.samples)), key=lambda i: -group.samples[i].reward)
        ends = order if len(order) < 2 else [order[0], order[-1]]
        pairs += [(group, i) for i in ends]
        others += [(group, i) for i in order[1:-1]]
    return (pairs + others)[:count]


def write_trajectories(
    folder: Path, step: int, groups: Iterable[Group], count: int, history: Mapping[int, WeightVersion]
) -> Path | None:
    """Writes `trajectories/step_N.jsonl`; None where there is nothing to write."""
    picks = choose(groups, count)
    if not picks:
        return None
    path = folder / "trajectories" / f"step_{step}.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps(describe_sample(group, i, history), ensure_ascii=False, default=str) for group, i in picks]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="replace")
    return path
