"""The record of a step: the samples as lines of text, and the batch as it was trained as tensors.

`trajectories/step_N.jsonl` has one JSON object a sample, `batches/step_N.safetensors.gz` the packed batch of the same
samples. The lines are written last: a step without them is not recorded.
"""

import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tensordict import TensorDict

from tandem.api.batch import check, unpack
from tandem.api.lines import json_line
from tandem.api.media import written
from tandem.api.requests import RequestTiming, StopReason
from tandem.api.samples import Dropped, Group, Sample
from tandem.api.weights import WeightVersion
from tandem.config.errors import ConfigError
from tandem.tracking.record_files import TIMES, TIMES_OF, lines_path, recorded_steps, tensors_path


@dataclass(frozen=True)
class Pick:
    """A sample that is recorded."""

    group: Group
    index: int
    """Its place in the group."""

    sample_id: int
    """Its number in the batch."""

    @property
    def sample(self) -> Sample:
        """The sample itself."""
        return self.group.samples[self.index]


def choose(groups: Iterable[Group], count: int | None) -> list[Pick]:
    """Up to ``count`` samples, or all: the best and the worst of each group, and then the groups' others."""
    ends, others, first = [], [], 0
    for group in groups:
        order = sorted(range(len(group.samples)), key=lambda i: -group.samples[i].reward)
        picks = [Pick(group, i, first + i) for i in order]
        ends += picks if len(picks) < 2 else [picks[0], picks[-1]]
        others += picks[1:-1]
        first += len(order)
    return (ends + others)[:count]


def choose_dropped(dropped: Iterable[Dropped], count: int | None) -> list[Dropped]:
    """Up to ``count`` dropped prompts, or all; of each reason the first, then the second, and so on."""
    seen: Counter[str] = Counter()
    ranked = []
    for one in dropped:
        ranked.append((seen[one.reason], one))
        seen[one.reason] += 1
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])][:count]


def _version_runs(sample: Sample, history: Mapping[int, WeightVersion]) -> list[list[dict[str, Any]]]:
    """Tells for each trajectory which weights made how many of its trained tokens, in order."""
    told = []
    for trajectory in sample.trajectories:
        runs: list[dict[str, Any]] = []
        for number in trajectory.versions[trajectory.loss_mask].tolist():
            if not runs or runs[-1]["version"] != number:
                digest = history[number].digest if number in history else ""
                runs.append({"version": number, "tokens": 0} | ({"digest": digest} if digest else {}))
            runs[-1]["tokens"] += 1
        told.append(runs)
    return told


def _of_group(step: int, group: Group) -> dict[str, Any]:
    failures = [*group.failure_words, *group.failures[len(group.failure_words) :]]
    return {
        "step": step,
        "group": group.group_id,
        "source": group.source,
        "answer": group.data.get("answer"),
        "failures": failures,
    }


def _of_sample(sample: Sample, index: int, history: Mapping[int, WeightVersion]) -> dict[str, Any]:
    return {
        "sample": index,
        "prompt": sample.prompt_text,
        "completion": sample.completion_text,
        "messages": written(sample.messages),
        "conversations": [written(one) for one in sample.conversations],
        "reward": float(sample.reward),
        "rewards": dict(sample.rewards),
        "raw_rewards": dict(sample.raw_rewards),
        "accuracy": sample.accuracy,
        "extracted_answer": sample.answer,
        "judges": dict(sample.words),
        "in_loss": sample.in_loss,
        "greedy": sample.greedy,
        "tokens": sample.num_trained_tokens,
        "stop_reason": [StopReason(trajectory.stop_reason).name.lower() for trajectory in sample.trajectories],
        "versions": _version_runs(sample, history),
    }


def describe(step: int, pick: Pick, history: Mapping[int, WeightVersion], advantages: Mapping[int, float]) -> dict[str, Any]:
    """The line of a trained sample."""
    trained = {"sample_id": pick.sample_id, "advantage": advantages.get(pick.sample_id), "dropped": None, "why": None}
    return _of_group(step, pick.group) | _of_sample(pick.sample, pick.index, history) | trained


def describe_dropped(step: int, one: Dropped, history: Mapping[int, WeightVersion]) -> dict[str, Any]:
    """The line of a prompt that was not trained: its best sample, or the prompt alone where it has none."""
    reason = {"sample_id": None, "advantage": None, "dropped": one.reason, "why": one.words or None}
    picks = choose([one.group], 1)
    if picks:
        return _of_group(step, one.group) | _of_sample(picks[0].sample, picks[0].index, history) | reason
    nothing = dict.fromkeys(sorted(FROM_LINES))
    return nothing | _of_group(step, one.group) | {"messages": written(one.group.data.get("messages") or [])} | reason


def mean_advantages(batch: Mapping[str, torch.Tensor]) -> dict[int, float]:
    """The mean advantage of each sample over its trained tokens. In numpy: torch would start threads of its own."""
    if "advantages" not in batch:
        return {}
    sums: dict[int, tuple[float, int]] = {}
    advantages, mask, bounds = (batch[name].numpy() for name in ("advantages", "loss_mask", "cu_seqlens"))
    for number, start, end in zip(batch["sample_id"].tolist(), bounds, bounds[1:], strict=False):
        own = advantages[start:end][mask[start:end]]
        total, count = sums.get(number, (0.0, 0))
        sums[number] = (total + float(own.sum(dtype="float64")), count + len(own))
    means = {number: total / count for number, (total, count) in sums.items() if count}
    return {number: mean for number, mean in means.items() if math.isfinite(mean)}


def packed_lines(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """Packs the lines as a file of JSON lines that readers of tables take, too."""
    packed = []
    for line in lines:
        text = json_line(line)
        packed.append(json_line(_for_tables(line)) if _ODD_NUMBER.search(text) else text)
    return "".join(text + "\n" for text in packed).encode("utf-8", errors="replace")


_ODD_NUMBER = re.compile(r"NaN|Infinity|\d{19}")
"""Signs of a number that tables have no place for; in a text they do no harm."""


def _for_tables(value: Any) -> Any:
    """Replaces a number that is not finite by nothing, and a whole one of more than 64 bits by its digits."""
    if isinstance(value, Mapping):
        return {name: _for_tables(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_for_tables(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**63 else value


def packed_tensors(batch: Mapping[str, torch.Tensor], picks: Sequence[Pick]) -> bytes:
    """The fields of a batch and the times of the requests, compressed as little as pays: floats hardly shrink further."""
    times = [(pick.sample_id, timing) for pick in picks for timing in pick.sample.timings]
    columns = dict(batch)
    if times:
        columns[TIMES] = torch.tensor([timing for _, timing in times], dtype=torch.float32)
        columns[TIMES_OF] = torch.tensor([number for number, _ in times])
    return gzip.compress(safetensors.torch.save(columns), compresslevel=1, mtime=0)


# ---------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class RecordedSample:
    """One sample of a recorded step, as it was trained, or dropped."""

    step: int
    group: int
    """The prompt's group; unique in the run."""

    sample: int | None = None
    """Its place in the group; None where the episode failed, so that there is none."""

    sample_id: int | None = None
    """Its number in the batch; None if it was not trained."""

    source: str = ""
    prompt: str = ""
    """The prompt as the model read it."""

    completion: str = ""
    """The last reply."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The whole conversation: all turns, with calls of tools where there are any."""

    conversations: list[list[dict[str, Any]]] = field(default_factory=list)
    """The conversation behind each trajectory, where there are several: an agent that rewrote its history, or held more
    than one. `messages` is the one that the agent spoke in last."""

    answer: Any = None
    """The expected answer of the row."""

    extracted_answer: str | None = None
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by name."""

    raw_rewards: dict[str, float] = field(default_factory=dict)
    """The values of parts before weight, normalisation and clip, if they differ."""

    accuracy: float | None = None
    advantage: float | None = None
    """Mean over its trained tokens."""

    judges: dict[str, str] = field(default_factory=dict)
    """The words of judges, by the name of the reward."""

    in_loss: bool = True
    greedy: bool = False
    tokens: int = 0
    """Trained tokens."""

    stop_reason: list[str] = field(default_factory=list)
    """The stop reason of each trajectory."""

    versions: list[list[dict[str, Any]]] = field(default_factory=list)
    """The weights of each trajectory, with the number of its trained tokens that they made."""

    dropped: str | None = None
    """Why its prompt was not trained; None if it was."""

    why: str | None = None
    """The message of that failure."""

    failures: list[str] = field(default_factory=list)
    """The samples of its group that failed and are missing."""

    timings: tuple[RequestTiming, ...] = ()
    """Timings of its requests in order, if the engine knows them."""

    trajectories: tuple[dict[str, torch.Tensor], ...] = ()
    """The fields of the batch, by trajectory: ``[S]`` each, or one number; empty if it was not trained."""


FROM_LINES = {field.name for field in fields(RecordedSample)} - {"timings", "trajectories"}
"""The fields that each line has, in whatever order; the others are those of the tensors."""


def load_trajectories(run: Path | str, step: int | None = None, *, tensors: bool = True) -> Iterator[RecordedSample]:
    """The recorded samples of a step, or of all steps in order. ``tensors``: whether those of the batch are read too.

    Example: ``best = max(load_trajectories("runs/addition/grpo", step=12), key=lambda sample: sample.reward or 0)``

    Raises:
        ConfigError: there is no such folder or step; names the steps that are recorded.
    """
    folder = Path(run).expanduser()
    steps = [require_step(folder, step)] if step is not None else recorded_steps(folder)
    if not steps:
        require_step(folder, 0)
    return (sample for number in steps for sample in _samples(folder, number, tensors))


def load_batch(run: Path | str, step: int) -> TensorDict:
    """The recorded sequences of a step as a packed batch, to the bit what was trained: `actor.ppo_update` takes it.

    It is the whole batch where `tracking.trajectories_per_step` is null.

    Raises:
        ConfigError: the step is not recorded, or without tensors.
    """
    folder = Path(run).expanduser()
    columns, _ = _read_tensors(folder, require_step(folder, step))
    if not columns:
        raise ConfigError(f"{folder}: step {step} was recorded without its batch, because its loop gave `log` none")
    return check(TensorDict(columns, batch_size=[]))


def require_step(folder: Path, step: int) -> int:
    """Passes a step that is recorded."""
    steps = recorded_steps(folder)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give the folder of a run, such as runs/addition/grpo")
    if not steps:
        raise ConfigError(
            f"{folder} has no recorded step: it is no run folder, no step of it has ended, or "
            "tracking.trajectories_per_step was 0"
        )
    if step not in steps:
        near = sorted(steps, key=lambda one: abs(one - step))[:3]
        raise ConfigError(
            f"{folder} has no record of step {step}; it has {len(steps)} steps from {steps[0]} to {steps[-1]}, the nearest "
            f"{', '.join(map(str, sorted(near)))}"
        )
    return step


def _read_tensors(folder: Path, step: int) -> tuple[dict[str, torch.Tensor], dict[int, list[RequestTiming]]]:
    """The fields of the batch, and the times of requests by sample; empty where none were written."""
    path = tensors_path(folder, step)
    if not path.is_file():
        return {}, {}
    columns = safetensors.torch.load(gzip.decompress(path.read_bytes()))
    times: dict[int, list[RequestTiming]] = {}
    if TIMES in columns:
        for number, row in zip(columns.pop(TIMES_OF).tolist(), columns.pop(TIMES).tolist(), strict=True):
            times.setdefault(number, []).append(RequestTiming(*row))
    return columns, times


def _samples(folder: Path, step: int, tensors: bool) -> Iterator[RecordedSample]:
    columns, times = _read_tensors(folder, step) if tensors else ({}, {})
    own: dict[int, list[dict[str, torch.Tensor]]] = {}
    for sequence in unpack(TensorDict(columns, batch_size=[])) if columns else []:
        own.setdefault(int(sequence["sample_id"]), []).append(sequence)
    with lines_path(folder, step).open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            number = line.get("sample_id")
            told = {name: value for name, value in line.items() if name in FROM_LINES and value is not None}
            yield RecordedSample(
                **{"step": step, **told},
                timings=tuple(times.get(number, ())),
                trajectories=tuple(own.get(number, ())),
            )
