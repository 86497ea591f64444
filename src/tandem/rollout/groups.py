"""Groups other than n equal samples: whole-group workflows, greedy baselines, votes, and groups trained on in part.

`MajorityLabels`, `Compared` and `FirstSamples` wrap a workflow of one sample and act when its group is finished;
`WithGreedyBaseline` wraps the workflow that makes the group.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tandem.api.failures import DataFailure, InfrastructureFailure, WrongWorkflow, as_failure
from tandem.api.workflow import GeneratesTokens, Group, RolloutWorkflow, Sample, Vote
from tandem.config.data import EPOCH, INDEX, SOURCE
from tandem.config.errors import ConfigError
from tandem.rollout.sample_checks import counted, described, least_samples, name_of
from tandem.rollout.workflows import one_sample

QUESTION = ("messages", SOURCE, EPOCH, INDEX)
"""Columns of a row that hold the question. Other columns may reveal the answer."""


class Votes(Protocol):
    """Counts votes; `tandem.rewards.majority.MajorityVote` implements it."""

    def answer_of(self, sample: Sample) -> str | None:
        """Returns the final answer of a sample; None if there is none."""
        ...

    async def __call__(self, answers: Sequence[str | None], expected: object = None) -> Vote | None:
        """Counts the votes. Returns None if no answer could be parsed. ``expected`` is used for `Vote.right` only."""
        ...


class MajorityLabels(RolloutWorkflow):
    """TTRL (arXiv:2504.16084): a sample's reward is 1 if its answer equals the majority answer of its group, else 0.

    The wrapped workflow gets only the question, without the row's other columns. A row's answer is used for metrics only:
    samples get no accuracy, because filters and curricula would use the accuracy.
    """

    def __init__(self, workflow: RolloutWorkflow, vote: Votes):
        self.workflow, self.vote, self.name = workflow, vote, name_of(workflow)

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Group | Sample | None:
        """Runs the wrapped workflow on the question only."""
        question = {name: data[name] for name in QUESTION if name in data}
        return await self.workflow.arun_episode(engine, question)

    async def finish_group(self, samples: tuple[Sample, ...], data: Mapping[str, Any]) -> tuple[Sample, ...]:
        """Sets the rewards by majority vote.

        Raises:
            DataFailure: ``no_answer_parsed``: no sample gives an answer; the prompt is skipped.
            WrongWorkflow: the workflow has already set a sample's reward.
        """
        if any(sample.own_reward for sample in samples):
            raise WrongWorkflow(
                f"algorithm.labels=majority judges by a vote, and {described(self)} gives a reward of its own; leave one of "
                "them out"
            )
        answers = [self.vote.answer_of(sample) for sample in samples]
        vote = await self.vote(answers, data.get("answer"))
        if vote is None:
            raise DataFailure("no_answer_parsed", f"none of {len(samples)} samples gives an answer, so there is no majority")
        shared = _vote_metrics(vote)
        right = vote.right or [None] * len(samples)
        return tuple(
            replace(
                sample,
                reward=float(agrees),
                rewards={},
                raw_rewards={},
                accuracy=None,
                metrics={**sample.metrics, **shared} | ({} if correct is None else {"accuracy": float(correct)}),
            )
            for sample, agrees, correct in zip(samples, vote.agrees, right, strict=True)
        )


def _vote_metrics(vote: Vote) -> dict[str, float]:
    """Returns the metrics of the vote, which are added to each sample of the group."""
    metrics = {"ttrl/majority_ratio": vote.ratio, "ttrl/undecided": float(vote.undecided)}
    if vote.right is None:
        return metrics
    majority = vote.agrees.index(True)
    same = [agrees == right for agrees, right in zip(vote.agrees, vote.right, strict=True)]
    return metrics | {
        "ttrl/label_accuracy": float(vote.right[majority]),
        "ttrl/reward_accuracy": sum(same) / len(same),
        f"ttrl/pass@{len(same)}": float(any(vote.right)),
    }


class Compares(Protocol):
    """Compares the samples of a prompt; `tandem.rewards.reward.Reward` implements it with the terms of the row's data
    set."""

    async def compare(self, samples: Sequence[Sample], row: Mapping[str, Any]) -> list[Sample]:
        """Returns the samples with the results of the comparison added to their rewards."""
        ...


class _Around(RolloutWorkflow):
    """A workflow that acts when the group of the wrapped ``workflow`` is finished."""

    workflow: RolloutWorkflow

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Group | Sample | None:
        """Runs the wrapped workflow."""
        return await self.workflow.arun_episode(engine, data)


class Compared(_Around):
    """Adds the reward terms that compare the samples of a prompt, after the wrapped workflow has finished the group."""

    def __init__(self, workflow: RolloutWorkflow, reward: Compares):
        self.workflow, self.reward, self.name = workflow, reward, name_of(workflow)
        self.makes_group, self.reads_scores = workflow.makes_group, workflow.reads_scores

    async def finish_group(self, samples: tuple[Sample, ...], data: Mapping[str, Any]) -> tuple[Sample, ...]:
        """Compares the samples and adds the results to their rewards."""
        samples = await self.workflow.finish_group(samples, data)
        compared = [sample for sample in samples if not sample.own_reward]
        judged = iter(await self.reward.compare(compared, data) if compared else ())
        return tuple(sample if sample.own_reward else next(judged) for sample in samples)


class FirstSamples(_Around):
    """Restricts training and group statistics to the first ``count`` samples of a group; the other samples are used for
    votes and metrics only."""

    def __init__(self, workflow: RolloutWorkflow, count: int):
        if count < 1:
            raise ConfigError(f"algorithm.update_samples must be at least 1, got {count}")
        self.workflow, self.count, self.name = workflow, count, name_of(workflow)
        self.reads_scores = workflow.reads_scores

    async def finish_group(self, samples: tuple[Sample, ...], data: Mapping[str, Any]) -> tuple[Sample, ...]:
        """Excludes samples beyond the first ``count`` from loss and statistics. Samples already outside the loss do not
        count."""
        finished, remaining = [], self.count
        for sample in await self.workflow.finish_group(samples, data):
            if remaining == 0:
                sample = replace(sample, in_loss=False, in_statistics=False)
            remaining -= sample.in_loss
            finished.append(sample)
        return tuple(finished)


class WholeGroup(RolloutWorkflow):
    """A workflow that makes the whole group itself (``makes_group``), checked against ``min_group_size`` as in `Repeated`.

    ``min_group_size`` None: half of the group's samples and failures together, rounded up.
    """

    makes_group = True

    def __init__(self, workflow: RolloutWorkflow, min_group_size: int | None = None, *, finish_later: bool = False):
        """``finish_later``: see `Repeated`."""
        self.workflow, self.min_group_size, self.reads_scores = workflow, min_group_size, finish_later

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Group:
        result = await self.workflow.arun_episode(engine, data)
        if result is None:
            raise DataFailure("workflow_returned_none")
        if not isinstance(result, Group):
            raise WrongWorkflow(
                f"{described(self.workflow)} says `makes_group = True`, and returned a {type(result).__name__}; return a "
                "Group, or remove makes_group, so that the workflow runs once for each sample"
            )
        least = least_samples(self.min_group_size, len(result.samples) + len(result.failures))
        with counted(result.failures):
            if len(result.samples) < least:
                raise DataFailure(
                    "group_too_small", f"{len(result.samples)} samples, and a group needs {least} (rollout.min_group_size)"
                )
            if self.reads_scores:
                return result
            return replace(result, samples=await self.finish_group(result.samples, data))

    async def finish_group(self, samples: tuple[Sample, ...], data: Mapping[str, Any]) -> tuple[Sample, ...]:
        """Finishes the group as the wrapped workflow does."""
        return tuple(await self.workflow.finish_group(samples, data))


class WithGreedyBaseline(RolloutWorkflow):
    """ReMax (arXiv:2310.10505): adds one greedy answer to the samples of a prompt. Its reward is the baseline.

    The greedy answer is the last sample of the group (``greedy``) and outside loss and statistics. The attribute ``greedy``
    is the workflow of one sample with greedy sampling.
    """

    def __init__(self, group: RolloutWorkflow, greedy: RolloutWorkflow):
        self.group, self.greedy, self.reads_scores = group, greedy, group.reads_scores

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Group:
        """Runs the group and the greedy sample at the same time, see `RolloutWorkflow`.

        Raises:
            DataFailure: ``greedy_sample_failed``: without its baseline the prompt cannot be trained on.
        """
        for_sample = getattr(engine, "for_sample", None)
        greedy_engine = for_sample(GREEDY_SAMPLE) if for_sample is not None else engine
        group, baseline = await asyncio.gather(
            self.group.arun_episode(engine, data), one_sample(self.greedy, greedy_engine, data), return_exceptions=True
        )
        if isinstance(group, BaseException):
            raise group
        if not isinstance(group, Group):
            raise WrongWorkflow(f"a greedy baseline needs the workflow of a group, this one returned {type(group).__name__}")
        if isinstance(baseline, (InfrastructureFailure, WrongWorkflow)):
            raise baseline
        if isinstance(baseline, BaseException):
            failure = as_failure(baseline)
            error = DataFailure("greedy_sample_failed", str(failure))
            error.failed_samples = (*group.failures, failure.reason)
            raise error from failure
        baseline = replace(baseline, greedy=True, in_loss=False, in_statistics=False)
        return replace(group, samples=(*group.samples, baseline))

    async def finish_group(self, samples: tuple[Sample, ...], data: Mapping[str, Any]) -> tuple[Sample, ...]:
        """Finishes all samples except the baseline as the wrapped workflow does."""
        others = tuple(sample for sample in samples if not sample.greedy)
        return (*await self.group.finish_group(others, data), *(sample for sample in samples if sample.greedy))


GREEDY_SAMPLE = 1 << 40
"""Number of the greedy sample in noise keys, which no other sample has."""
