"""One trial of each of the user's rewards before anything is loaded: on an empty, a wrong and the expected answer."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tandem.config.errors import ConfigError
from tandem.evaluation.reward_check import Asker, RewardCall, unfit_rows
from tandem.rewards.function import WorkerReward
from tandem.rewards.reward import Reward

log = logging.getLogger(__name__)

OWN = "tandem."
"""The beginning of the spellings of Tandem's own functions, which tests have tried."""

TOKENS = {"prompt_ids", "completion_ids"}
"""Arguments that these answers, which no model has made, have not."""

WRONG = "I do not know."


def try_rewards(reward: Reward, rows: Sequence[Mapping[str, Any]]) -> None:
    """Calls the functions that judge the first row, if it can be judged. Warns of one that fails on some answers, and of
    one that gives all of them the same. Functions that ask for tokens are left out, and async ones and classes: what those
    open belongs to the run's event loop, which is not there yet.

    Raises:
        ConfigError: a function fails whatever the answer is; says where in it.
    """
    if not rows or unfit_rows(reward, rows[:1]):
        return
    row = rows[0]
    known = [("the expected answer", str(row["answer"]))] if row.get("answer") else []
    answers = [("an empty answer", ""), ("a wrong answer", WRONG), *known]
    for name, judge in reward.of(row).single.items():
        if isinstance(judge, WorkerReward) and not (judge.pool.spec.startswith(OWN) or TOKENS & set(judge.arguments.names)):
            asker = Asker(judge, judge.pool.timeout_s)
            with ThreadPoolExecutor(1) as aside:  # a notebook has an event loop of its own
                asked = asker.all_at_once((0, row, what, answer) for what, answer in answers)
                judge_calls(name, aside.submit(asyncio.run, asked).result())


def judge_calls(name: str, calls: Sequence[RewardCall]) -> None:
    """Says what the trial of a reward showed.

    Raises:
        ConfigError: every call failed, and none by its deadline.
    """
    failed = [call for call in calls if call.failed]
    if len(failed) == len(calls) and not any(call.failed == "reward_timeout" for call in failed):
        raise ConfigError(
            f"the reward fails on the first row whatever the answer is, so nothing would be trained: {failed[-1].words}; "
            "mend it, and see `tandem check-reward`"
        )
    if failed:
        whose, words = ", ".join(call.what for call in failed), failed[0].words
        log.warning("the reward fails on the first row with %s, and such samples are dropped: %s", whose, words)
    elif len(calls) > 2 and len({call.value for call in calls}) == 1:
        log.warning(
            "reward %s gives %g to an empty, a wrong and the expected answer of the first row alike: nothing can be learnt "
            "from what is always the same; see `tandem check-reward`",
            name,
            calls[0].value,
        )
