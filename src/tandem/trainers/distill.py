"""On-policy distillation: `tandem distill`. The student generates, and the teacher computes the probability of each token.

The loop is that of `tandem train`, except that advantages come from the teacher instead of a reward.
"""

from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.config.errors import ConfigError
from tandem.config.load import Resolved
from tandem.config.preference import DistillConfig, training_config
from tandem.flow.process import decided
from tandem.models.catalog import describing
from tandem.models.tokenizer import load_tokenizer
from tandem.trainers.loop import Summary, run_session


def train(resolved: Resolved[DistillConfig], **how: Any) -> Summary:
    """Runs distillation; ``how``: see `run_training`.

    Raises:
        ConfigError: any fault of the configuration, before a model is loaded, such as a teacher with another tokenizer.
    """
    resolved = decided(resolved)
    config = resolved.config
    check_teacher(config)
    return run_session(resolved, training_config(config), **how)


def check_teacher(config: DistillConfig) -> None:
    """Checks that teacher and student have the same vocabulary.

    Raises:
        ConfigError: the vocabularies differ; the message names both models and a difference.
    """
    names = (config.actor.path, str(config.teacher.path))
    student, teacher = (load_tokenizer(describing(name)) for name in names)
    difference = vocabulary_difference(student, teacher)
    if difference:
        raise ConfigError(
            f"teacher.path={names[1]} has another tokenizer than the student, actor.path={names[0]}: {difference}. "
            "The teacher must judge the student's own tokens; use a teacher of the same family, or learn from its texts "
            "with `tandem sft`"
        )


def vocabulary_difference(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> str:
    """Describes a difference of two vocabularies; empty if every token has the same id in both."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return ""
    both = sorted(set(ours) | set(theirs), key=lambda token: (ours.get(token, theirs.get(token, 0)), token))
    token = next(token for token in both if ours.get(token) != theirs.get(token))
    numbers = (f"token {table[token]}" if token in table else "no token" for table in (theirs, ours))
    compared = " for the teacher and ".join(numbers)
    return f"{len(theirs)} tokens instead of {len(ours)}; {token!r} is {compared} for the student"
