"""The rewards that need a model, as stages between the end of the episodes and the choice of the groups to train on."""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.api.batch import num_sequences, pack
from tandem.api.chat_template import render, text_of
from tandem.api.engines import TrainEngine
from tandem.api.failures import DataFailure, UserCodeFailed
from tandem.api.media import MediaTokens, encode, media_of
from tandem.api.plugins import interrupted_after, run_user_code
from tandem.api.samples import Group, Sample, Trajectory
from tandem.api.team import Team
from tandem.config.errors import ConfigError
from tandem.data.encoding import ChatEncoder, Encoded
from tandem.flow.conductor import Conductor
from tandem.flow.plan import PlannedScore, RunPlan
from tandem.flow.stages import Stage
from tandem.flow.writing import Judged, WritingRole
from tandem.media.parts import read_for
from tandem.rewards.engine_judge import WritingReward
from tandem.rewards.reward import Reward, Scored, is_open
from tandem.rollout.failure_budget import FailureLog, least_samples, too_few


def step_spans(text: str, separator: str) -> list[tuple[int, int]]:
    """Tells where each step begins and ends, without the white space around it; one step where there is no separator."""
    spans, start = [], 0
    for piece in text.split(separator):
        step = piece.strip()
        if step:
            begin = start + piece.index(step)
            spans.append((begin, begin + len(step)))
        start += len(piece) + len(separator)
    return spans


def last_tokens(tokenizer: PreTrainedTokenizerBase, trajectory: Trajectory, reply: str, ends: Sequence[int]) -> list[int]:
    """Finds, for each place behind a character of ``reply``, the token of the trajectory that brought that character. The
    reply is the last run of tokens that the policy made.

    Raises:
        DataFailure: these tokens say something else.
    """
    generated = (trajectory.versions >= 0).tolist()
    end = max((place + 1 for place, is_generated in enumerate(generated) if is_generated), default=0)
    first = max((place + 1 for place, is_generated in enumerate(generated[:end]) if not is_generated), default=0)
    ids = trajectory.input_ids[first:end].tolist()
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    begin = text.find(reply)
    if not ids or begin < 0:
        raise DataFailure("steps_not_placed", "the reply is not the text of the last tokens that the policy made")

    def written(count: int) -> int:
        """Characters of the text that stand once so many tokens are there; one that is cut in two does not."""
        decoded = str(tokenizer.decode(ids[:count], skip_special_tokens=True))
        whole = next((part for part in (decoded, decoded.rstrip("\ufffd")) if text.startswith(part)), None)
        if whole is not None:
            return len(whole)
        return next((place for place, (a, b) in enumerate(zip(decoded, text, strict=False)) if a != b), len(text))

    counts = [bisect.bisect_left(range(len(ids)), begin + end, key=written) for end in ends]
    return [first + max(count, 1) - 1 for count in counts]


T = TypeVar("T")


class ModelReader:
    """Reads samples in the tokens of one model; see `tandem.api.scoring.ScoreReader`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        same_tokens: bool,
        max_length: int,
        actor: PreTrainedTokenizerBase | None = None,
    ):
        """``actor``: the tokenizer of whoever wrote the samples, to find steps among its tokens."""
        self.tokenizer, self.same_tokens, self.max_length, self.actor = tokenizer, same_tokens, max_length, actor
        self._chat = ChatEncoder(tokenizer, max_length=max_length)

    def conversation(self, sample: Sample, row: Mapping[str, Any]) -> dict[str, Any]:
        """Implements `ScoreReader.conversation`: the messages of the sample, or those of its row and the completion."""
        return self.chat(_messages(sample, row), row.get("tools"))

    def steps(
        self, sample: Sample, row: Mapping[str, Any], separator: str, *, marker: str = "", place: bool = False
    ) -> dict[str, Any]:
        """Implements `ScoreReader.steps`. A reply without words is one step, which ends with the last token."""
        *prompt, reply = _messages(sample, row)
        text = text_of(reply.get("content"))
        spans = step_spans(text, separator)
        if spans:
            steps = [text[start:end] for start, end in spans]
            encoded, ends = self._chat.steps(prompt, steps, "" if marker else separator, marker)
            fields = _fields(encoded)
        else:
            fields, spans = self.chat([*prompt, reply]), [(0, len(text))]
            ends = [len(fields["input_ids"]) - 1]
        fields["step_end"] = [i in set(ends) for i in range(len(fields["input_ids"]))]
        if place:
            assert self.actor is not None, "the run gives the actor's tokenizer"
            behind = [end for _, end in spans]
            fields["step_tokens"] = last_tokens(self.actor, sample.trajectories[-1], text, behind)
        return fields

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> dict[str, Any]:
        """The fields of `conversation` for these messages, of which the last is the reply."""
        if not text_of(messages[-1].get("content")).strip():
            return self._silence(messages)
        return _fields(self._chat.completion(list(messages[:-1]), list(messages[-1:]), tools))

    def _silence(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A conversation that ends with an empty reply. It is judged too, or silence would cost the policy nothing."""
        messages = read_for(self.tokenizer, messages)
        try:
            rendered = render(self.tokenizer, messages)
        except DataFailure as error:
            raise DataFailure("template_refuses", f"the chat template refuses an empty reply: {error}") from error
        return self._whole(encode(self.tokenizer, rendered, media_of(messages)))

    def text(self, text: str) -> dict[str, Any]:
        """Implements `ScoreReader.text`."""
        return self._whole(encode(self.tokenizer, text))

    def _whole(self, tokens: MediaTokens) -> dict[str, Any]:
        """The fields of a text of which each token but the first counts."""
        count = len(tokens.ids)
        if not count:
            raise DataFailure("empty_text", "there is nothing for the model to read")
        if count > self.max_length:
            raise DataFailure("too_long", f"{count} tokens, and the model that scores reads {self.max_length}")
        return _fields(Encoded(tokens.ids, [False] + [True] * (count - 1), tokens.media))

    def trajectory(self, sample: Sample) -> dict[str, Any]:
        """Implements `ScoreReader.trajectory`."""
        if not self.same_tokens:
            raise ConfigError(
                "this model has other tokens than the actor, so it cannot read the actor's: use conversation()"
            )
        if not sample.trajectories:
            raise ConfigError("in the middle of an episode there is no finished trajectory to read: use conversation()")
        last = sample.trajectories[-1]
        if len(last.input_ids) > self.max_length:
            raise DataFailure("too_long", f"{len(last.input_ids)} tokens, and the model that scores reads {self.max_length}")
        names = ("input_ids", "loss_mask", "rollout_logprobs", "temperature")
        media = {} if last.media is None else {"media": last.media}
        return {name: getattr(last, name) for name in names} | media


def _messages(sample: Sample, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if sample.messages:
        return list(sample.messages)
    if not row.get("messages"):
        raise DataFailure("no_messages", "the workflow gave a sample without messages, and its row has none")
    return [*row["messages"], {"role": "assistant", "content": sample.completion_text}]


def _fields(encoded: Encoded) -> dict[str, Any]:
    media = {"media": encoded.media} if encoded.media else {}
    return {"input_ids": encoded.ids, "loss_mask": encoded.mask, "temperature": 1.0} | media


class ScoreRole:
    """A `Score` with the model that it asked for."""

    def __init__(
        self, planned: PlannedScore, engine: TrainEngine, reader: ModelReader | None, vocabulary: int, *, timeout_s: float
    ):
        """``reader``: on ranks where samples are, of which rank 0 is one. ``vocabulary``: number of the model's tokens.
        ``timeout_s``: for each sample, of a score that a user wrote."""
        self.planned, self.engine, self.reader, self.vocabulary = planned, engine, reader, vocabulary
        self._timeout_s = timeout_s

    @property
    def deadline_s(self) -> float | None:
        """Longest time for one sample; None: any, of a score that is not a user's own and so cannot hang."""
        return self._timeout_s if self.planned.term.is_file else None

    def read(self, sample: Sample, row: Mapping[str, Any]) -> Mapping[str, Any] | DataFailure:
        """The sequence that the model reads for a sample, or the failure that says why it cannot."""
        assert self.reader is not None, "ranks with samples read"
        planned = self.planned
        try:
            sequence = self._called(1, planned.score.read, sample=sample, row=row, reader=self.reader)
        except DataFailure as failure:
            return failure
        self._check(sequence)
        return sequence

    def _check(self, sequence: Any) -> None:
        """Passes what a model can read.

        Raises:
            UserCodeFailed: it is something else.
        """
        names, wrong = ("input_ids", "loss_mask", "temperature"), ""
        if not isinstance(sequence, Mapping) or not set(names) <= set(sequence):
            returned = sorted(sequence) if isinstance(sequence, Mapping) else type(sequence).__name__
            wrong = f"must give a dict of at least {', '.join(names)}, as the methods of reader do; it gave {returned}"
        elif not 0 < len(sequence["input_ids"]) == len(sequence["loss_mask"]):
            sizes = [len(sequence[name]) for name in names[:2]]
            wrong = f"must give input_ids and loss_mask of one length above 0; it gave {sizes[0]} and {sizes[1]}"
        elif not 0 <= min(map(int, sequence["input_ids"])) <= max(map(int, sequence["input_ids"])) < self.vocabulary:
            wrong = f"gave a token that the model does not have; it has {self.vocabulary}"
        elif self.planned.score.per_step and (
            not {"step_end", "step_tokens"} <= set(sequence) or sum(sequence["step_end"]) != len(sequence["step_tokens"])
        ):
            wrong = "must give step_end, and as many step_tokens, as reader.steps(…, place=True) does"
        if wrong:
            raise UserCodeFailed(f"reward {self.planned.name!r} ({self.planned.term.name}): read {wrong}")

    def score(self, batch: TensorDict) -> torch.Tensor:
        """``[N]``, on every rank.

        Raises:
            UserCodeFailed: it gave something else.
        """
        planned = self.planned
        values = self._called(num_sequences(batch), planned.score.score, batch=batch, model=self.engine)
        per_step = planned.score.per_step
        count, what = (int(batch["step_end"].sum()), "step") if per_step else (num_sequences(batch), "sequence")
        if not isinstance(values, torch.Tensor) or values.shape != (count,):
            returned = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise UserCodeFailed(
                f"reward {planned.name!r} must give one score for each {what}, [{count}]; it gave {returned}"
            )
        return values.detach().float().cpu()

    def _called(self, samples: int, function: Callable[..., T], **named: Any) -> T:
        """Calls a method of the score. A user's own has the deadline of so many samples, and its errors name the file."""
        term = self.planned.term
        if not term.is_file:
            return function(**named)
        with interrupted_after(term.name, samples * self._timeout_s):
            return run_user_code(term.name, function, **named)


class ModelGroupScorer:
    """Gives finished groups the rewards that need a model, one model after another, and then whatever of the reward is added
    when the batch is there. It is false while nothing is."""

    def __init__(
        self,
        plan: RunPlan,
        roles: dict[str, ScoreRole | WritingRole],
        reward: Reward,
        conductor: Conductor,
        team: Team,
        min_group_size: int | None,
    ):
        """``roles``: by the names of the scores."""
        self.plan, self.roles, self.reward, self.conductor, self.team = plan, roles, reward, conductor, team
        self.min_group_size = min_group_size
        self._log = FailureLog()

    def __bool__(self) -> bool:
        return bool(self.plan.later)

    def __call__(self, groups: Sequence[Group], *, training: bool = True) -> list[Group | DataFailure]:
        """The groups with their rewards, or why a group cannot be trained on. Collective; other ranks than 0 bring none.
        ``training``: see `Reward.add`.

        A sample that a model cannot judge leaves its group, as one that failed in its episode does.
        """
        judged: list[list[Scored | DataFailure | Sample]] = [[] for _ in groups]
        with self.team.together():
            for i, group in enumerate(groups):
                judged[i] = [
                    sample if sample.own_reward else Scored(sample, i, self.plan.sum_of(group.data), group.data)
                    for sample in group.samples
                ]
        for planned in self.plan.staged:
            stage = self.plan.stage(planned.stage)
            assert stage is not None, "the plan has a stage for each score"
            if isinstance(planned.score, WritingReward) and planned.score.compares and not training:
                continue  # evaluation judges each sample by itself
            self._add(planned, stage, judged)
        with self.team.together():
            scored = [sample for samples in judged for sample in samples if isinstance(sample, Scored)]
            added = iter(self.reward.add(scored, training=training))
            whole = [[next(added) if isinstance(sample, Scored) else sample for sample in samples] for samples in judged]
        return [self._whole(group, samples) for group, samples in zip(groups, whole, strict=True)]

    def close(self) -> None:
        """Ends the engines of judges that write; idempotent."""
        self._close(self.roles.values())

    def _close(self, roles: Iterable[ScoreRole | WritingRole]) -> None:
        for role in roles:
            if isinstance(role, WritingRole):
                role.engine.close()

    def generate_again(self) -> None:
        """Implements `ModelGroupScorer.generate_again`: a model that scored may have taken the engine's memory."""
        self.conductor.prepare("generate")

    def _add(self, planned: PlannedScore, stage: Stage, judged: list[list[Scored | DataFailure | Sample]]) -> None:
        role = self.roles[planned.name]
        if isinstance(role, WritingRole):
            self._write(planned, role, stage, judged)
            return
        pending: list[Scored] = []
        sequences: list[Mapping[str, Any]] = []

        def read() -> int:
            for samples in judged:
                for j, entry in _asked(planned, samples).items():
                    sequence = role.read(entry.sample, entry.row)
                    if isinstance(sequence, DataFailure):
                        samples[j] = sequence
                    else:
                        pending.append(entry)
                        if planned.score.per_step:
                            entry.tokens[planned.name] = list(sequence["step_tokens"])
                        sequences.append({name: value for name, value in sequence.items() if name != "step_tokens"})
            return len(sequences)

        if not self.team.share(read):
            return
        values = iter(self.conductor.run(stage, role, self.team.share(lambda: pack(sequences))).tolist())
        for entry in pending:  # ranks other than 0 have asked nothing
            count = len(entry.tokens[planned.name]) if planned.score.per_step else 1
            entry.values[planned.name] = list(islice(values, count))

    def _write(
        self, planned: PlannedScore, role: WritingRole, stage: Stage, judged: list[list[Scored | DataFailure | Sample]]
    ) -> None:
        """Takes what a judge writes of samples, which rank 0 alone has."""
        with self.team.together():
            pending = [_asked(planned, samples, together=role.written.compares) for samples in judged]
        scored = [list(some.values()) for some in pending if some]
        groups = [Group(tuple(entry.sample for entry in some), data=some[0].row) for some in scored]
        if not self.team.share(lambda: len(groups)):
            return
        verdicts = iter(self.conductor.run(stage, role, groups))
        for samples, some in zip(judged, pending, strict=True):
            for (j, entry), verdict in zip(some.items(), next(verdicts) if some else (), strict=True):
                samples[j] = _with_verdict(entry, planned.name, verdict)

    def _whole(self, group: Group, samples: Sequence[Sample | DataFailure]) -> Group | DataFailure:
        fine = tuple(sample for sample in samples if isinstance(sample, Sample))
        failed = [sample for sample in samples if isinstance(sample, DataFailure)]
        if not failed:
            return replace(group, samples=fine)
        self._log.warn(failed)
        reasons = (*group.failures, *(failure.reason for failure in failed))
        lost_baseline = any(s.greedy for s in group.samples) and not any(s.greedy for s in fine)
        count = sum(not s.greedy for s in fine)
        n = count + len(reasons)
        least = least_samples(self.min_group_size, n)
        if lost_baseline or count < least or not any(s.in_loss for s in fine):
            lost = failed[-1] if lost_baseline else too_few(failed, n, least)
            lost.failed_samples, lost.num_left = reasons, count
            return lost
        return replace(group, samples=fine, failures=reasons)


def _asked(
    planned: PlannedScore, samples: Sequence[Scored | DataFailure | Sample], *, together: bool = False
) -> dict[int, Scored]:
    """The samples of a group that the model is asked about, by their places: those for which its term counts.
    ``together``: all that stand, if it counts for one of them, for they are compared.

    Raises:
        ConfigError: another reward has given one of them a part of that name.
    """
    standing = {j: entry for j, entry in enumerate(samples) if isinstance(entry, Scored) and entry.reward in planned.rewards}
    counting = {j: entry for j, entry in standing.items() if is_open(planned.rewards[entry.reward].options, entry.raw)}
    if any(planned.name in entry.sample.rewards for entry in counting.values()):
        raise ConfigError(
            f"two rewards are called {planned.name!r}: a model's, and a part of another reward; rename one of them"
        )
    return standing if together and counting else counting


def _with_verdict(entry: Scored, name: str, verdict: Judged) -> Scored | DataFailure:
    if isinstance(verdict.value, DataFailure):
        return verdict.value
    entry.values[name] = [verdict.value]
    if verdict.words:
        entry.sample = replace(entry.sample, words={**entry.sample.words, name: verdict.words})
    return entry
