"""Look at the recorded samples of a run: rewards, comments of judges, why prompts were dropped and, with --tokens, the
advantage and log-probabilities of each token. Docs: docs/records.md.

examples:
  tandem trajectories runs/addition/grpo
  tandem trajectories runs/addition/grpo --step 12 --sort reward --json
  tandem trajectories runs/addition/grpo --step 12 --sample 3 --tokens
  tandem trajectories runs/addition/grpo --step all --dropped
"""

import argparse
import itertools
import json
import math
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.arguments import run_at
from tandem.config.errors import ConfigError
from tandem.tracking.record_files import recorded_steps

if TYPE_CHECKING:
    from tandem.tracking.records import RecordedSample

SHOWN = 10
SORTS = ("reward", "advantage", "accuracy", "tokens", "group", "step")
COLUMNS = (
    "advantages",
    "token_rewards",
    "rollout_logprobs",
    "proximal_logprobs",
    "reference_logprobs",
    "values",
    "versions",
)
"""Fields of the batch that --tokens shows, as far as the batch has them."""

Decode = Callable[[int], str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN[@STEP]", help="the run")
    parser.add_argument("--step", help="a step, `last` (default) or `all`")
    parser.add_argument("--sample", type=int, metavar="ID", help="only the sample of this number in its batch")
    parser.add_argument("--dropped", action="store_true", help="only prompts that were not trained, with their reasons")
    parser.add_argument("--min-reward", type=float, metavar="R", help="only samples with at least this reward")
    parser.add_argument("--max-reward", type=float, metavar="R", help="only samples with at most this reward")
    parser.add_argument("--sort", metavar="NAME", help=f"largest first, by {', '.join(SORTS)} or a part of the reward")
    parser.add_argument("--reverse", action="store_true", help="with --sort: smallest first")
    parser.add_argument("--limit", type=int, metavar="N", help=f"at most N samples (default: {SHOWN}; with --json all)")
    parser.add_argument("--tokens", action="store_true", help="each token with its advantage, log-probabilities and version")
    parser.add_argument("--json", action="store_true", help="one JSON object a sample")


def run(arguments: argparse.Namespace) -> int:
    from tandem.tracking.records import load_trajectories  # noqa: PLC0415 — imports torch

    folder, step_of_run = run_at(arguments.run)
    if step_of_run is not None and arguments.step is not None:
        raise ConfigError(f"@{step_of_run} and --step {arguments.step} both name a step; leave one out")
    recorded = recorded_steps(folder)
    step = _step(step_of_run or arguments.step or "last", recorded)
    samples = list(load_trajectories(folder, step))
    chosen = _sorted(_filtered(samples, arguments), arguments.sort, reverse=arguments.reverse)
    limit = arguments.limit if arguments.limit is not None or arguments.json else SHOWN
    shown = chosen[:limit]
    decode = _decoder(folder) if arguments.tokens else None
    if arguments.json:
        for sample in shown:
            print(json.dumps(_plain(sample, decode)))  # in ASCII, which every terminal can show
        return 0
    for sample in shown:
        print(_text(sample, decode), end="\n\n")
    print(_summary(samples, chosen, shown, step, recorded))
    return 0


def _step(written: str, recorded: list[int]) -> int | None:
    """Returns the step that the text names, or `None` for all steps."""
    if written == "all":
        return None
    if written == "last":
        return recorded[-1] if recorded else 0
    if not written.isdecimal():
        raise ConfigError(f"--step is a number, `last` or `all`, got {written!r}")
    return int(written)


def _filtered(samples: Iterable["RecordedSample"], arguments: argparse.Namespace) -> "list[RecordedSample]":
    low = -math.inf if arguments.min_reward is None else arguments.min_reward
    high = math.inf if arguments.max_reward is None else arguments.max_reward
    by_reward = arguments.min_reward is not None or arguments.max_reward is not None

    def fits(sample: "RecordedSample") -> bool:
        if (sample.dropped is not None) != arguments.dropped:
            return False
        if arguments.sample is not None and sample.sample_id != arguments.sample:
            return False
        return not by_reward or (sample.reward is not None and low <= sample.reward <= high)

    return [sample for sample in samples if fits(sample)]


def _sorted(samples: "list[RecordedSample]", by: str | None, *, reverse: bool) -> "list[RecordedSample]":
    """Sorts by a field or a part of the reward, largest first. Samples without a value come last."""
    if by is None:
        return samples
    parts = sorted({name for sample in samples for name in sample.rewards})
    if by not in (*SORTS, *parts):
        raise ConfigError(f"--sort {by}: there is no such value; choose one of {', '.join((*SORTS, *parts))}")

    def place(sample: "RecordedSample") -> tuple[bool, float]:
        value = getattr(sample, by) if by in SORTS else sample.rewards.get(by)
        return value is None, 0.0 if value is None else (value if reverse else -value)

    return sorted(samples, key=place)


def _decoder(folder: Path) -> Decode:
    """Returns a function that turns a token into its text by the run's tokenizer, or into its number if there is none."""
    from tandem.config.experiment import TrainConfig  # noqa: PLC0415
    from tandem.config.load import load_config  # noqa: PLC0415 — only for --tokens
    from tandem.models.catalog import resolve  # noqa: PLC0415
    from tandem.models.tokenizer import load_tokenizer  # noqa: PLC0415

    try:
        tokenizer = load_tokenizer(resolve(load_config(TrainConfig, folder / "config.yaml").config.actor.path))
    except (ConfigError, OSError) as error:
        print(f"warning: tokens are shown as numbers, because the tokenizer cannot be loaded: {error}", file=sys.stderr)
        return str
    return lambda token: str(tokenizer.decode([token]))


def _plain(sample: "RecordedSample", decode: Decode | None) -> dict[str, Any]:
    """Returns a sample as JSON types; numbers that are not finite become null."""
    row = {name: value for name, value in vars(sample).items() if name not in ("trajectories", "timings")}
    row["timings"] = [
        {name: value if math.isfinite(value) else None for name, value in timing._asdict().items()}
        for timing in sample.timings
    ]
    if decode is not None:
        row["trajectories"] = [
            {"tokens": [decode(token) for token in trajectory["input_ids"].tolist()]}
            | {name: _finite(trajectory[name].tolist()) for name in trajectory}
            for trajectory in sample.trajectories
        ]
    return row


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------------------- text


def shown_text(text: str) -> str:
    """Makes a model's text safe for a terminal: control characters, and characters that change the direction of writing,
    become escapes such as `\\u202e`. Line breaks and tabs stay."""
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter)[0] != "C" else f"\\u{ord(letter):04x}" for letter in text
    )


def _text(sample: "RecordedSample", decode: Decode | None) -> str:
    return "\n".join([_head(sample), *_turns(sample), *_notes(sample), *(_tokens(sample, decode) if decode else ())])


def _head(sample: "RecordedSample") -> str:
    words = [f"step {sample.step}", f"group {sample.group}"]
    words += [] if sample.sample_id is None else [f"sample {sample.sample_id}"]
    words += [f"source {shown_text(sample.source)}"] if sample.source else []
    words += [f"dropped: {shown_text(sample.dropped)}"] if sample.dropped is not None else []
    words += _figures(sample)
    if sample.tokens:
        words += [f"{sample.tokens} tokens", *_ends(sample)]
        versions = sorted({run["version"] for runs in sample.versions for run in runs})
        words += [f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"]
    words += [] if sample.in_loss else ["not in the loss"]
    words += ["greedy"] if sample.greedy else []
    return "== " + "  ".join(words)


def _ends(sample: "RecordedSample") -> list[str]:
    """Says why the sample's trajectories ended: ``ended by stop``, ``3 trajectories ended by stop (2), length (1)``."""
    if not sample.stop_reason:
        return []
    reasons = ", ".join(f"{why} ({count})" for why, count in Counter(sample.stop_reason).items())
    several = len(sample.stop_reason) > 1
    return [f"{len(sample.stop_reason)} trajectories ended by {reasons}" if several else f"ended by {sample.stop_reason[0]}"]


def _figures(sample: "RecordedSample") -> Iterator[str]:
    for name in ("reward", "accuracy", "advantage"):
        value = getattr(sample, name)
        if value is not None:
            parts = ", ".join(f"{part} {number:.4g}" for part, number in sample.rewards.items()) if name == "reward" else ""
            yield f"{name} {value:.4g}" + (f" ({shown_text(parts)})" if parts else "")


def _turns(sample: "RecordedSample") -> Iterator[str]:
    if not sample.messages:
        yield from ("-- prompt", shown_text(sample.prompt), "-- completion", shown_text(sample.completion))
    for number, messages in enumerate(sample.conversations or [sample.messages], 1):
        if sample.conversations:
            yield f"-- conversation {number} of {len(sample.conversations)}"
        yield from _messages(messages)


def _messages(messages: "list[dict[str, Any]]") -> Iterator[str]:
    for message in messages:
        yield f"-- {shown_text(str(message.get('role')))}"
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        yield shown_text("".join(map(_part, parts)))
        fields = {name: value for name, value in message.items() if name not in ("role", "content")}
        yield from (f"   {name}: {shown_text(json.dumps(value, ensure_ascii=False))}" for name, value in fields.items())


def _part(part: Any) -> str:
    """Shows a part of a message: a text as it is, an image or sound as its number in the media store."""
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    medium = part.get("medium") if isinstance(part, dict) else None
    if isinstance(medium, dict):
        return f"[{medium.get('kind')} {medium.get('number')}]"
    return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)


def _notes(sample: "RecordedSample") -> Iterator[str]:
    if sample.answer is not None:
        yield f"-- expected answer: {shown_text(str(sample.answer))}"
    if sample.raw_rewards:
        parts = ", ".join(f"{name} {number:.4g}" for name, number in sample.raw_rewards.items())
        yield f"-- before weights and options: {shown_text(parts)}"
    for name, words in sample.judges.items():
        yield f"-- {shown_text(name)}: {shown_text(words)}"
    if sample.why:
        yield f"-- why: {shown_text(sample.why)}"
    for failure in sample.failures:
        yield f"-- a sample of this group failed: {shown_text(failure)}"
    for number, timing in enumerate(sample.timings, 1):
        parts_of_time = (
            f"{timing.queued_s:.3f} s in the queue",
            f"first token after {timing.first_token_s:.3f} s",
            f"end after {timing.total_s:.3f} s",
        )
        known = [word for word, value in zip(parts_of_time, timing, strict=True) if not math.isnan(value)]
        yield f"-- request {number}: {', '.join(known)}"


def _tokens(sample: "RecordedSample", decode: Decode) -> Iterator[str]:
    """Yields one line for each trained token, and one line for each run of untrained tokens."""
    for number, trajectory in enumerate(sample.trajectories, 1):
        names = [name for name in COLUMNS if name in trajectory]
        yield f"-- tokens of trajectory {number}"
        heads = (name.removesuffix("_logprobs").removeprefix("token_") for name in names)
        yield "  ".join([f"{'token':<20}", *(f"{head:>10}" for head in heads)])
        rows = zip(*(trajectory[name].tolist() for name in ("input_ids", "loss_mask", *names)), strict=True)
        for trained, run in itertools.groupby(rows, key=lambda row: row[1]):
            if not trained:
                yield f"({sum(1 for _ in run)} tokens of context)"
                continue
            for token, _, *figures in run:
                yield "  ".join([f"{shown_text(repr(decode(token))):<20}", *(f"{figure:>10.4g}" for figure in figures)])


def _summary(
    samples: "list[RecordedSample]",
    chosen: "list[RecordedSample]",
    shown: "list[RecordedSample]",
    step: int | None,
    recorded: list[int],
) -> str:
    where = f"step {step}" if step is not None else "all steps"
    lines = [f"{len(shown)} of {len(chosen)} samples that fit, of {where}; {len(recorded)} steps are recorded, "]
    lines[0] += f"{recorded[0]} to {recorded[-1]}."
    reasons = Counter(sample.dropped for sample in samples if sample.dropped is not None)
    if reasons:
        counts = ", ".join(f"{count} {shown_text(str(reason))}" for reason, count in reasons.most_common())
        lines.append(f"Recorded prompts that were dropped: {counts} (--dropped shows them).")
    return "\n".join(lines)
