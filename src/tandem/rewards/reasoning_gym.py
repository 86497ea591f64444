"""Rows of reasoning-gym, judged by the library's own scorers, which parse what a model wrote: in a worker process."""

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from tandem.api.failures import RewardFailure
from tandem.api.workflow import RewardFn
from tandem.config.errors import ConfigError
from tandem.config.extras import install_extra
from tandem.rewards.extraction import after_hashes, boxed
from tandem.rewards.function import WorkerReward

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def score(completion: str, row: Mapping[str, Any]) -> dict[str, float]:
    """The scorer of the row's family (``metadata["source_dataset"]``), 0 to 1; right means at least 0.99.

    The answer is what stands in the last ``<answer>`` tags, else in a box, else after ``####``, else the whole completion.
    """
    from reasoning_gym import get_score_answer_fn  # noqa: PLC0415 optional library, slow to import

    metadata = row.get("metadata")
    family = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    if not family:
        raise RewardFailure("reward_raised", f"the row has no metadata['source_dataset']; columns there: {', '.join(row)}")
    tagged = ANSWER.findall(completion)
    answer = tagged[-1].strip() if tagged else boxed(completion) or after_hashes(completion) or completion.strip()
    value = float(get_score_answer_fn(family)(answer, dict(row)))
    return {"score": value, "accuracy": float(value >= 0.99)}


def build_reasoning_gym(*, timeout_s: float, workers: int | None = None) -> RewardFn:
    """Builds the reward, see `score`.

    Raises:
        ConfigError: the library is not installed.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(f"reward 'reasoning_gym' needs the library: {install_extra('data')}")
    spec = "tandem.rewards.reasoning_gym:score"
    return WorkerReward(score, spec, name="reasoning_gym", timeout_s=timeout_s, workers=workers)
