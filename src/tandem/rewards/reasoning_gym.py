"""Rows of reasoning-gym, scored by the library's own scorers. These parse model text, so they run in a worker process."""

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from tandem.api.failures import RewardFailure
from tandem.api.workflow import RewardFn
from tandem.config.errors import ConfigError, install_extra
from tandem.rewards.function import WorkerReward
from tandem.rewards.reading import after_hashes, boxed

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def score(completion: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Scores a completion, 0 to 1, with the scorer of the row's family (``metadata["source_dataset"]``). The accuracy is 1
    for a score of at least 0.99.

    The answer is the text in the last ``<answer>`` tags; without these, the text in a box, after ``####``, or the whole
    completion.
    """
    from reasoning_gym import get_score_answer_fn  # noqa: PLC0415 optional library, slow to import

    metadata = row.get("metadata")
    family = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    if not family:
        raise RewardFailure("row_unfit", f"the row has no metadata['source_dataset']; columns there: {', '.join(row)}")
    tagged = ANSWER.findall(completion)
    answer = tagged[-1].strip() if tagged else boxed(completion) or after_hashes(completion) or completion.strip()
    value = float(get_score_answer_fn(family)(answer, dict(row)))
    return {"score": value, "accuracy": float(value >= 0.99)}


def build_reasoning_gym(*, timeout_s: float, workers: int | None = None) -> RewardFn:
    """Builds the reward `score`, which runs in worker processes.

    Raises:
        ConfigError: the library is not installed.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(f"reward 'reasoning_gym' needs the library: {install_extra('data')}")
    spec = "tandem.rewards.reasoning_gym:score"
    return WorkerReward(score, spec, name="reasoning_gym", timeout_s=timeout_s, workers=workers)
