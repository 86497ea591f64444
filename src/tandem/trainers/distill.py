"""On-policy distillation: `tandem distill`. The student writes, the teacher says how probable each word was to it.

The loop is that of `tandem train`; only the advantages come from the teacher instead of a reward.
"""

from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.config.errors import ConfigError
from tandem.config.load import Resolved
from tandem.config.preference import DistillConfig, training_config
from tandem.flow.process import decided
from tandem.lifecycle.summary import Summary
from tandem.models.catalog import describing
from tandem.models.tokenizer import load_tokenizer
from tandem.trainers.rl import run_session


def train(resolved: Resolved[DistillConfig], **how: Any) -> Summary:
    """Runs it; ``how``: see `run_training`.

    Raises:
        ConfigError: anything about the configuration, before a model is loaded; a teacher with another tokenizer.
    """
    resolved = decided(resolved)
    config = resolved.config
    check_teacher(config)
    return run_session(resolved, training_config(config), **how)


def check_teacher(config: DistillConfig) -> None:
    """Passes if teacher and student read and write the same tokens.

    Raises:
        ConfigError: another tokenizer; names both models and what differs.
    """
    names = (config.actor.path, str(config.teacher.path))
    student, teacher = (load_tokenizer(describing(name)) for name in names)
    difference = vocabulary_difference(student, teacher)
    if difference:
        raise ConfigError(
            f"teacher.path={names[1]} has another tokenizer than the student, actor.path={names[0]}: {difference}. "
            "The teacher must judge the student's own tokens; take a teacher of the same family, or learn from its texts "
            "with `tandem sft`"
        )


def vocabulary_difference(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> str:
    """The difference in words; empty if every token has the same number."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return ""
    both = sorted(set(ours) | set(theirs), key=lambda token: (ours.get(token, theirs.get(token, 0)), token))
    token = next(token for token in both if ours.get(token) != theirs.get(token))
    numbers = (f"token {table[token]}" if token in table else "no token" for table in (theirs, ours))
    where = " there and ".join(numbers)
    return f"{len(theirs)} tokens instead of {len(ours)}; {token!r} is {where} here"
