"""Computes rewards that need a model: in stages after the episodes and before the groups for training are chosen, or where
a workflow awaits them in the middle of an episode."""

import asyncio
import bisect
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.api.batch import num_sequences, pack
from tandem.api.chat_template import render, text_of
from tandem.api.engines import TrainEngine
from tandem.api.failures import DataFailure, InfrastructureFailure, RewardFailure, UserCodeFailed, WrongWorkflow
from tandem.api.media import MediaTokens, encode, media_of
from tandem.api.plugins import Interrupted, interrupt, interrupted_after, run_user_code
from tandem.api.team import Team
from tandem.api.workflow import Group, RewardFn, RewardResult, Sample, Trajectory
from tandem.config.errors import ConfigError
from tandem.data.encoding import ChatEncoder, Encoded
from tandem.engines.inference.engine_calls import use_gpu
from tandem.flow.conductor import Conductor
from tandem.flow.plan import RunPlan
from tandem.flow.planned_models import PlannedScore
from tandem.flow.stages import Stage
from tandem.flow.writing import Judged, WritingRole
from tandem.media.parts import read_for
from tandem.rewards.engine_judge import WritingReward
from tandem.rewards.reward import MOST, Reward, Scored, is_open
from tandem.rollout.sample_checks import FailureLog, least_samples, too_few


def step_spans(text: str, separator: str) -> list[tuple[int, int]]:
    """Returns start and end (exclusive) of each step in ``text``, without surrounding white space; [] for a blank text."""
    spans, start = [], 0
    for piece in text.split(separator):
        step = piece.strip()
        if step:
            begin = start + piece.index(step)
            spans.append((begin, begin + len(step)))
        start += len(piece) + len(separator)
    return spans


def last_tokens(tokenizer: PreTrainedTokenizerBase, trajectory: Trajectory, reply: str, ends: Sequence[int]) -> list[int]:
    """Returns, for each of ``ends``, the index of the trajectory's token that completes this many characters of the reply.
    The reply is the last run of tokens that the policy generated.

    Raises:
        DataFailure: the text of these tokens does not contain the reply.
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
        """Returns how many characters of the text the first ``count`` tokens make, without an incomplete character."""
        decoded = str(tokenizer.decode(ids[:count], skip_special_tokens=True))
        whole = next((part for part in (decoded, decoded.rstrip("\ufffd")) if text.startswith(part)), None)
        if whole is not None:
            return len(whole)
        return next((place for place, (a, b) in enumerate(zip(decoded, text, strict=False)) if a != b), len(text))

    counts = [bisect.bisect_left(range(len(ids)), begin + end, key=written) for end in ends]
    return [first + max(count, 1) - 1 for count in counts]


T = TypeVar("T")


class ModelReader:
    """Encodes samples with the tokenizer of one model; implements `tandem.api.workflow.ScoreReader`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        same_tokens: bool,
        max_length: int,
        actor: PreTrainedTokenizerBase | None = None,
    ):
        """``same_tokens``: True if the model has the actor's tokens. ``max_length``: most tokens that the model reads.
        ``actor``: the actor's tokenizer, to find steps among the actor's tokens."""
        self.tokenizer, self.same_tokens, self.max_length, self.actor = tokenizer, same_tokens, max_length, actor
        self._chat = ChatEncoder(tokenizer, max_length=max_length)

    def conversation(self, sample: Sample, row: Mapping[str, Any]) -> dict[str, Any]:
        """Implements `ScoreReader.conversation`: encodes the sample's messages, or else the row's and the completion."""
        return self.chat(_messages(sample, row), row.get("tools"))

    def steps(
        self, sample: Sample, row: Mapping[str, Any], separator: str, *, marker: str = "", place: bool = False
    ) -> dict[str, Any]:
        """Implements `ScoreReader.steps`. A blank reply is one step, which ends with the last token."""
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
            step_ends = [end for _, end in spans]
            fields["step_tokens"] = last_tokens(self.actor, sample.trajectories[-1], text, step_ends)
        return fields

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> dict[str, Any]:
        """Encodes messages, of which the last is the reply, into the fields of `conversation`."""
        if not text_of(messages[-1].get("content")).strip():
            return self._with_empty_reply(messages)
        return _fields(self._chat.completion(list(messages[:-1]), list(messages[-1:]), tools))

    def _with_empty_reply(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Encodes a conversation with an empty reply, which is judged too, so that empty replies can be penalised."""
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
        """Returns the fields of a text in which every token except the first counts for the score."""
        count = len(tokens.ids)
        if not count:
            raise DataFailure("empty_text", "the text has no tokens, so the model has nothing to read")
        if count > self.max_length:
            raise DataFailure("too_long", f"{count} tokens, and the model that scores reads at most {self.max_length}")
        return _fields(Encoded(tokens.ids, [False] + [True] * (count - 1), tokens.media))

    def trajectory(self, sample: Sample) -> dict[str, Any]:
        """Implements `ScoreReader.trajectory`."""
        if not self.same_tokens:
            raise ConfigError(
                "this model has another tokenizer than the actor, so it cannot read the actor's tokens: use conversation()"
            )
        if not sample.trajectories:
            raise ConfigError("in the middle of an episode there is no finished trajectory to read: use conversation()")
        last = sample.trajectories[-1]
        if len(last.input_ids) > self.max_length:
            length = len(last.input_ids)
            raise DataFailure("too_long", f"{length} tokens, and the model that scores reads at most {self.max_length}")
        names = ("input_ids", "loss_mask", "rollout_logprobs", "temperature")
        media = {} if last.media is None else {"media": last.media}
        return {name: getattr(last, name) for name in names} | media


def _messages(sample: Sample, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if sample.messages:
        return list(sample.messages)
    if not row.get("messages"):
        raise DataFailure("no_messages", "neither the sample of the workflow nor its row has messages")
    return [*row["messages"], {"role": "assistant", "content": sample.completion_text}]


def _fields(encoded: Encoded) -> dict[str, Any]:
    media = {"media": encoded.media} if encoded.media else {}
    return {"input_ids": encoded.ids, "loss_mask": encoded.mask, "temperature": 1.0} | media


class ScoreRole:
    """A `Score` together with its model."""

    def __init__(
        self, planned: PlannedScore, engine: TrainEngine, reader: ModelReader | None, vocabulary: int, *, timeout_s: float
    ):
        """``reader``: None on ranks that have no samples; rank 0 always has them. ``vocabulary``: size of the model's
        vocabulary. ``timeout_s``: time limit per sample, for a score from a user's file."""
        self.planned, self.engine, self.reader, self.vocabulary = planned, engine, reader, vocabulary
        self._timeout_s = timeout_s

    @property
    def deadline_s(self) -> float | None:
        """Time limit for one sample, in seconds; None for Tandem's own scores, which cannot hang."""
        return self._timeout_s if self.planned.term.is_file else None

    def read(self, sample: Sample, row: Mapping[str, Any]) -> Mapping[str, Any] | DataFailure:
        """Encodes a sample for the model; returns the failure if the model cannot read it."""
        assert self.reader is not None, "ranks with samples read"
        planned = self.planned
        try:
            sequence = self._called(1, planned.score.read, sample=sample, row=row, reader=self.reader)
        except DataFailure as failure:
            return failure
        self._check(sequence)
        return sequence

    def _check(self, sequence: Any) -> None:
        """Checks that the model can read ``sequence``, which the score's `read` returned.

        Raises:
            UserCodeFailed: fields are missing or have wrong lengths, or a token is outside the vocabulary.
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
            wrong = "must give step_end, and as many step_tokens as there are steps, like reader.steps(…, place=True)"
        if wrong:
            raise UserCodeFailed(f"reward {self.planned.name!r} ({self.planned.term.name}): read {wrong}")

    def score(self, batch: TensorDict) -> torch.Tensor:
        """Returns the scores of a batch on every rank: float32 ``[N]``, one per sequence, or per step of a stepwise score.

        Raises:
            UserCodeFailed: the score returned no tensor, or one of another shape.
        """
        planned = self.planned
        values = self._called(num_sequences(batch), planned.score.score, batch=batch, model=self.engine)
        per_step = planned.score.per_step
        count, unit = (int(batch["step_end"].sum()), "step") if per_step else (num_sequences(batch), "sequence")
        if not isinstance(values, torch.Tensor) or values.shape != (count,):
            returned = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise UserCodeFailed(
                f"reward {planned.name!r} must give one score for each {unit}, [{count}]; it gave {returned}"
            )
        return values.detach().float().cpu()

    def _called(self, samples: int, function: Callable[..., T], **named: Any) -> T:
        """Calls a method of the score. A user's method has the time limit of ``samples`` samples; errors name its file."""
        term = self.planned.term
        if not term.is_file:
            return function(**named)
        with interrupted_after(term.name, samples * self._timeout_s):
            return run_user_code(term.name, function, **named)


class ModelGroupScorer:
    """Adds to finished groups the rewards that need a model, one model after another, and then the reward terms that are
    computed over the whole batch. Its truth value is False if the reward has no such terms."""

    def __init__(
        self,
        plan: RunPlan,
        roles: dict[str, ScoreRole | WritingRole],
        reward: Reward,
        conductor: Conductor,
        team: Team,
        min_group_size: int | None,
    ):
        """``roles``: the role of each score, by the score's name. ``min_group_size``: see `least_samples`."""
        self.plan, self.roles, self.reward, self.conductor, self.team = plan, roles, reward, conductor, team
        self.min_group_size = min_group_size
        self._log = FailureLog()

    def __bool__(self) -> bool:
        return bool(self.plan.later)

    def __call__(self, groups: Sequence[Group], *, training: bool = True) -> list[Group | DataFailure]:
        """Returns each group with its rewards, or the failure that excludes it from training. Collective; only rank 0
        passes groups.

        ``training``: see `Reward.add`.

        A sample that a model cannot judge is removed from its group, like a sample that failed in its episode.
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
                continue  # evaluation judges each sample alone
            self._add(planned, stage, judged)
        with self.team.together():
            scored = [sample for samples in judged for sample in samples if isinstance(sample, Scored)]
            added = iter(self.reward.add(scored, training=training))
            whole = [[next(added) if isinstance(sample, Scored) else sample for sample in samples] for samples in judged]
        return [self._whole(group, samples) for group, samples in zip(groups, whole, strict=True)]

    def close(self) -> None:
        """Ends the engines of judges that write text. Idempotent."""
        self._close(self.roles.values())

    def _close(self, roles: Iterable[ScoreRole | WritingRole]) -> None:
        for role in roles:
            if isinstance(role, WritingRole):
                role.engine.close()

    def generate_again(self) -> None:
        """Wakes the inference engine again, because a model that scored may have taken its memory."""
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
        for entry in pending:  # empty on ranks other than 0
            count = len(entry.tokens[planned.name]) if planned.score.per_step else 1
            entry.values[planned.name] = list(islice(values, count))

    def _write(
        self, planned: PlannedScore, role: WritingRole, stage: Stage, judged: list[list[Scored | DataFailure | Sample]]
    ) -> None:
        """Lets a judge model write its verdicts on the samples, and adds the verdicts to the samples. Only rank 0 has
        samples."""
        with self.team.together():
            pending = [_asked(planned, samples, together=role.written.compares) for samples in judged]
        scored = [list(entries.values()) for entries in pending if entries]
        groups = [Group(tuple(entry.sample for entry in entries), data=entries[0].row) for entries in scored]
        if not self.team.share(lambda: len(groups)):
            return
        verdicts = iter(self.conductor.run(stage, role, groups))
        for samples, entries in zip(judged, pending, strict=True):
            for (j, entry), verdict in zip(entries.items(), next(verdicts) if entries else (), strict=True):
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
    """Returns the samples of a group that the model must score, by their index: those for which its term counts.
    ``together``: if the term counts for any sample, return all that can be judged, because they are compared.

    Raises:
        ConfigError: another reward has already given a sample a part with the same name.
    """
    scored = {j: entry for j, entry in enumerate(samples) if isinstance(entry, Scored) and entry.reward in planned.rewards}
    counting = {j: entry for j, entry in scored.items() if is_open(planned.rewards[entry.reward].options, entry.raw)}
    if any(planned.name in entry.sample.rewards for entry in counting.values()):
        raise ConfigError(
            f"two rewards are called {planned.name!r}: a model's, and a part of another reward; rename one of them"
        )
    return scored if together and counting else counting


def _with_verdict(entry: Scored, name: str, verdict: Judged) -> Scored | DataFailure:
    if isinstance(verdict.value, DataFailure):
        return verdict.value
    entry.values[name] = [verdict.value]
    if verdict.words:
        entry.sample = replace(entry.sample, words={**entry.sample.words, name: verdict.words})
    return entry


MAX_STUCK = 8
"""The run ends when this many scores hang, each in a thread that cannot be ended."""


class EpisodeScore(RewardFn):
    """A `Score` as a reward that a workflow awaits: ``result = await self.judge(chat, data, self.helpful)``.

    Each conversation is scored alone, so its value depends neither on other conversations nor on their order. The value
    equals, to the bit, the one that the score's stage gives to this conversation alone; a stage that computes several
    conversations together may differ in the last digits.
    """

    reads_messages = True

    def __init__(self, name: str, scores: "EpisodeScores"):
        self.name, self._scores = name, scores

    async def __call__(
        self,
        *,
        prompt: str,
        completion: str,
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        row: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> RewardResult:
        """Implements `RewardFn.__call__`.

        Raises:
            DataFailure: the model cannot read this conversation.
            RewardFailure: a score from a user's file computed for longer than `reward_timeout_s`; waiting does not count.
            InfrastructureFailure: the model is not open, because no episode is running.
            WrongWorkflow: a score from a user's file raised, returned a wrong type, or hung too often; this ends the run.
        """
        sample = Sample((), 0.0, prompt_text=prompt, completion_text=completion, messages=tuple(messages))
        return RewardResult(await self._scores.ask(self.name, sample, row))


class EpisodeScores:
    """The model rewards that the episodes of this process await. One thread computes them one after another. If a score
    hangs, a new thread takes over."""

    def __init__(self, plan: RunPlan, max_stuck: int = MAX_STUCK):
        self.rewards = {score.name: EpisodeScore(score.name, self) for score in plan.scores if score.in_episodes}
        self._roles: Mapping[str, ScoreRole] = {}
        self._asked: SimpleQueue[_Asked | None] | None = None
        self._max_stuck = max_stuck

    def start(self, roles: Mapping[str, ScoreRole | WritingRole], device: str) -> None:
        """Starts scoring with the models of ``roles``, on ``device`` and with as many CPU threads as the caller uses."""
        self._roles = {name: role for name, role in roles.items() if name in self.rewards and isinstance(role, ScoreRole)}
        if self._roles and self._asked is None:
            self._asked = SimpleQueue()
            arguments = (self._asked, partial(_ScoringThread, torch.get_num_threads(), device), self._max_stuck)
            Thread(target=_serve, args=arguments, name="scores-in-episodes", daemon=True).start()

    async def ask(self, name: str, sample: Sample, row: Mapping[str, Any]) -> float:
        """Returns the score of one conversation by the reward ``name``."""
        role, queue = self._roles.get(name), self._asked
        if role is None or queue is None:
            raise InfrastructureFailure(
                "no_model",
                f"reward {name!r} was asked for a score before its model was open; ask in an episode",
            )
        try:
            future: Future[float] = Future()
            queue.put((future, role, sample, row))
            if self._asked is not queue and future.cancel():  # closed meanwhile: nothing reads the queue any more
                raise InfrastructureFailure("no_model", f"reward {name!r} was asked for a score after its model was closed")
            return await asyncio.wrap_future(future)
        except UserCodeFailed as error:
            raise WrongWorkflow(str(error)) from error

    def close(self) -> None:
        """Ends the scoring thread. Idempotent."""
        queue, self._asked = self._asked, None
        if queue is not None:
            queue.put(None)


_Asked = tuple[Future[float], ScoreRole, Sample, Mapping[str, Any]]


class _ScoringThread:
    """A thread that computes scores, until a score exceeds its time limit. It is a daemon thread, so a hanging score cannot
    keep the process alive."""

    def __init__(self, threads: int, device: str):
        self._todo: SimpleQueue[Callable[[], float] | None] = SimpleQueue()
        self._done: SimpleQueue[float | BaseException] = SimpleQueue()
        self._thread = Thread(target=self._run, args=(threads, device), name="score-in-episode", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True until the thread ends."""
        return self._thread.is_alive()

    def call(self, work: Callable[[], float], timeout_s: float | None) -> float | BaseException:
        """Runs ``work`` in the thread and returns its result or its exception. Raises `queue.Empty` if ``work`` takes longer
        than ``timeout_s`` seconds; after that the thread accepts no more work."""
        self._todo.put(work)
        try:
            return self._done.get(timeout=timeout_s)
        except Empty:
            interrupt(self._thread)
            self.close()
            raise

    def close(self) -> None:
        """Ends the thread after its present work."""
        self._todo.put(None)

    def _run(self, threads: int, device: str) -> None:
        torch.set_num_threads(threads)  # a new thread inherits neither this nor the current GPU
        use_gpu(device)
        with contextlib.suppress(Interrupted):
            while (work := self._todo.get()) is not None:
                try:
                    self._done.put(work())
                except Interrupted:
                    raise
                except BaseException as error:  # the worker boundary: raised again where the score is awaited
                    self._done.put(error)


def _serve(requests: "SimpleQueue[_Asked | None]", start: Callable[[], _ScoringThread], max_stuck: int) -> None:
    thread, stuck = start(), list[_ScoringThread]()
    while (request := requests.get()) is not None:
        future, role, sample, row = request
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = thread.call(partial(_score, role, sample, row), role.deadline_s)
        except Empty:
            stuck = [*(late for late in stuck if late.is_alive), thread]
            result, thread = _late(role, len(stuck), max_stuck), start()
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
    thread.close()


def _late(role: ScoreRole, stuck: int, max_stuck: int) -> Exception:
    name, overrun = role.planned.term.name, f"took longer than {role.deadline_s:g} s (reward_timeout_s)"
    if stuck < max_stuck:
        return RewardFailure("reward_timeout", f"{name} {overrun}; the call was abandoned")
    return UserCodeFailed(
        f"{name!r} {overrun}, and {stuck} calls of it hang in threads that cannot be ended; correct the reward and start "
        "again. Saved checkpoints are kept"
    )


def _score(role: ScoreRole, sample: Sample, row: Mapping[str, Any]) -> float:
    sequence = role.read(sample, row)
    if isinstance(sequence, DataFailure):
        raise sequence
    value = float(role.score(pack([sequence]))[0])
    if not abs(value) <= MOST:
        raise RewardFailure("reward_not_finite", f"reward {role.planned.name!r} gave {value}")
    return value
