"""The rewards that need a model, as stages between the end of the episodes and the choice of the groups to train on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.api.batch import num_sequences, pack
from tandem.api.engines import TrainEngine
from tandem.api.failures import DataFailure, UserCodeFailed
from tandem.api.plugins import run_user_code
from tandem.api.samples import Group, Sample
from tandem.api.team import Team
from tandem.config.errors import ConfigError
from tandem.data.encoding import TEMPLATE_ERRORS, ChatEncoder, Encoded
from tandem.flow.plan import PlannedScore, RunPlan, Stage
from tandem.flow.run import Runner
from tandem.flow.writing import WritingRole
from tandem.rollout.failure_budget import FailureLog, least_samples, too_few

T = TypeVar("T")


class ModelReader:
    """Reads samples in the tokens of one model; see `tandem.api.scoring.Reader`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, same_tokens: bool, max_length: int):
        self.tokenizer, self.same_tokens, self.max_length = tokenizer, same_tokens, max_length
        self._chat = ChatEncoder(tokenizer, max_length=max_length)

    def conversation(self, sample: Sample, row: Mapping[str, Any]) -> dict[str, Any]:
        """Implements `Reader.conversation`: the messages of the sample, or those of its row and the completion."""
        messages = list(sample.messages)
        if not messages:
            if not row.get("messages"):
                raise DataFailure("no_messages", "the workflow gave a sample without messages, and its row has none")
            messages = [*row["messages"], {"role": "assistant", "content": sample.completion_text}]
        return self.chat(messages)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The fields of `conversation` for these messages, of which the last is the reply."""
        if not str(messages[-1].get("content") or "").strip():
            return self._silence(messages)
        return _fields(self._chat.completion(list(messages[:-1]), list(messages[-1:])))

    def _silence(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A conversation that ends with an empty reply. It is judged too, or silence would cost the policy nothing."""
        try:
            rendered = str(self.tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False))
        except TEMPLATE_ERRORS as error:
            raise DataFailure("template_refuses", f"the chat template refuses an empty reply: {error}") from error
        return self.text(rendered)

    def text(self, text: str) -> dict[str, Any]:
        """Implements `Reader.text`."""
        ids = self._chat.encode(text)
        if not ids:
            raise DataFailure("empty_text", "there is nothing for the model to read")
        if len(ids) > self.max_length:
            raise DataFailure("too_long", f"{len(ids)} tokens, and the model that scores reads {self.max_length}")
        return _fields(Encoded(ids, [False] + [True] * (len(ids) - 1)))

    def trajectory(self, sample: Sample) -> dict[str, Any]:
        """Implements `Reader.trajectory`."""
        if not self.same_tokens:
            raise ConfigError(
                "this model has other tokens than the actor, so it cannot read the actor's: use conversation()"
            )
        last = sample.trajectories[-1]
        if len(last.input_ids) > self.max_length:
            raise DataFailure("too_long", f"{len(last.input_ids)} tokens, and the model that scores reads {self.max_length}")
        names = ("input_ids", "loss_mask", "rollout_logprobs", "temperature")
        return {name: getattr(last, name) for name in names}


def _fields(encoded: Encoded) -> dict[str, Any]:
    return {"input_ids": encoded.ids, "loss_mask": encoded.mask, "temperature": 1.0}


class ScoreRole:
    """A `Score` with the model that it asked for."""

    def __init__(self, planned: PlannedScore, engine: TrainEngine, reader: ModelReader | None, vocabulary: int):
        """``reader``: on rank 0, where the samples are. ``vocabulary``: number of the model's tokens."""
        self.planned, self.engine, self.reader, self.vocabulary = planned, engine, reader, vocabulary

    def read(self, sample: Sample, row: Mapping[str, Any]) -> Mapping[str, Any] | DataFailure:
        """The sequence that the model reads for a sample, or the failure that says why it cannot. Rank 0."""
        assert self.reader is not None, "rank 0 reads"
        planned = self.planned
        if planned.name in sample.rewards:
            raise ConfigError(
                f"two rewards are called {planned.name!r}: a model's, and a part of another reward; rename one of them"
            )
        try:
            sequence = _called(planned, planned.score.read, sample=sample, row=row, reader=self.reader)
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
            given = sorted(sequence) if isinstance(sequence, Mapping) else type(sequence).__name__
            wrong = f"must give a dict of at least {', '.join(names)}, as the methods of reader do; it gave {given}"
        elif not 0 < len(sequence["input_ids"]) == len(sequence["loss_mask"]):
            sizes = [len(sequence[name]) for name in names[:2]]
            wrong = f"must give input_ids and loss_mask of one length above 0; it gave {sizes[0]} and {sizes[1]}"
        elif not 0 <= min(map(int, sequence["input_ids"])) <= max(map(int, sequence["input_ids"])) < self.vocabulary:
            wrong = f"gave a token that the model does not have; it has {self.vocabulary}"
        if wrong:
            raise UserCodeFailed(f"reward {self.planned.name!r} ({self.planned.term.name}): read {wrong}")

    def score(self, batch: TensorDict) -> torch.Tensor:
        """``[N]``, on every rank.

        Raises:
            UserCodeFailed: it gave something else.
        """
        planned = self.planned
        values = _called(planned, planned.score.score, batch=batch, model=self.engine)
        if not isinstance(values, torch.Tensor) or values.shape != (num_sequences(batch),):
            given = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise UserCodeFailed(
                f"reward {planned.name!r} must give one score for each sequence, [{num_sequences(batch)}]; it gave {given}"
            )
        return values.detach().float().cpu()


def _called(planned: PlannedScore, function: Callable[..., T], **named: Any) -> T:
    """Calls a method of a score; what a user's own raises names his file."""
    return run_user_code(planned.term.name, function, **named) if planned.term.is_file else function(**named)


class GroupScorer:
    """Gives finished groups the rewards that need a model, one model after another. It is false while there are none."""

    def __init__(
        self,
        plan: RunPlan,
        roles: Mapping[str, ScoreRole | WritingRole],
        runner: Runner,
        team: Team,
        min_group_size: int | None,
    ):
        self.plan, self.roles, self.runner, self.team, self.min_group_size = plan, roles, runner, team, min_group_size
        self._log = FailureLog()

    def __bool__(self) -> bool:
        return bool(self.plan.scores)

    def change(self, plan: RunPlan, roles: Mapping[str, ScoreRole | WritingRole]) -> None:
        """From now on the rewards are those of another plan."""
        stay = [role.engine for role in roles.values()]
        self._close(role for role in self.roles.values() if not any(role.engine is engine for engine in stay))
        self.plan, self.roles = plan, roles
        self.runner.learn({planned.stage: roles[planned.name].score for planned in plan.scores})

    def __call__(self, groups: Sequence[Group]) -> list[Group | DataFailure]:
        """The groups with their rewards, or why a group cannot be trained on. Collective; other ranks than 0 bring none.

        A sample that a model cannot judge leaves its group, as one that failed in its episode does.
        """
        judged: list[list[Sample | DataFailure]] = [list(group.samples) for group in groups]
        for planned in self.plan.scores:
            stage = self.plan.stage(planned.stage)
            assert stage is not None, "the plan has a stage for each score"
            self._add(planned, stage, groups, judged)
        return [self._whole(group, samples) for group, samples in zip(groups, judged, strict=True)]

    def close(self) -> None:
        """Ends the engines of judges that write; idempotent."""
        self._close(self.roles.values())

    def _close(self, roles: Iterable[ScoreRole | WritingRole]) -> None:
        for role in roles:
            if isinstance(role, WritingRole):
                role.engine.close()

    def generate_again(self) -> None:
        """Implements `GroupScorer.generate_again`: a model that scored may have taken the engine's memory."""
        self.runner.prepare("generate")

    def _add(
        self, planned: PlannedScore, stage: Stage, groups: Sequence[Group], judged: list[list[Sample | DataFailure]]
    ) -> None:
        role = self.roles[planned.name]
        if isinstance(role, WritingRole):
            self._write(planned, stage, groups, judged)
            return
        places: list[tuple[int, int]] = []
        sequences: list[Mapping[str, Any]] = []

        def read() -> int:
            for i, group in enumerate(groups):
                for j, sample in enumerate(judged[i]):
                    if not isinstance(sample, Sample) or planned.weight(group.data) is None:
                        continue
                    sequence = role.read(sample, group.data)
                    if isinstance(sequence, DataFailure):
                        judged[i][j] = sequence
                    else:
                        places.append((i, j))
                        sequences.append(sequence)
            return len(sequences)

        if not self.team.share(read):
            return
        values = self.runner.call(stage, self.team.share(lambda: pack(sequences)))
        for (i, j), value in zip(places, values.tolist(), strict=False):  # ranks other than 0 have no places
            judged[i][j] = _with_score(judged[i][j], planned, value, planned.weight(groups[i].data))

    def _write(
        self, planned: PlannedScore, stage: Stage, groups: Sequence[Group], judged: list[list[Sample | DataFailure]]
    ) -> None:
        """Adds what a judge writes to the samples that stand; rank 0 alone has any."""
        chosen = [i for i, group in enumerate(groups) if planned.weight(group.data) is not None]
        standing = {i: [j for j, sample in enumerate(judged[i]) if isinstance(sample, Sample)] for i in chosen}
        found = {i: tuple(sample for sample in judged[i] if isinstance(sample, Sample)) for i in chosen}
        asked = [replace(groups[i], samples=samples) for i, samples in found.items() if samples]
        if not self.team.share(lambda: len(asked)):
            return
        verdicts = iter(self.runner.call(stage, asked))
        for i in (i for i, places in standing.items() if places):
            for j, one in zip(standing[i], next(verdicts), strict=True):
                sample = judged[i][j]
                if isinstance(one.value, DataFailure):
                    judged[i][j] = one.value
                    continue
                scored = _with_score(sample, planned, one.value, planned.weight(groups[i].data))
                if isinstance(scored, Sample) and one.written:
                    scored = replace(scored, written={**scored.written, planned.name: one.written})
                judged[i][j] = scored

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
            lost.failed_samples = reasons
            return lost
        return replace(group, samples=fine, failures=reasons)


def _with_score(
    sample: Sample | DataFailure, planned: PlannedScore, value: float, weight: float | None
) -> Sample | DataFailure:
    assert isinstance(sample, Sample) and weight is not None, "only samples that stand and have this reward are scored"
    if value != value or value in (float("inf"), float("-inf")):
        return DataFailure("reward_not_finite", f"the model of reward {planned.name!r} gave {value}")
    weighted = weight * value
    return replace(sample, reward=sample.reward + weighted, rewards={**sample.rewards, planned.name: weighted})
