"""The worker process for reward functions, which may hang, crash or fork. Imports no large packages."""

from collections.abc import Callable
from typing import Any

from tandem.api.failures import RewardFailure
from tandem.rewards.signatures import adapted, read_outcome, words_of
from tandem.workers.child import Answering, failure_message, load_function, serve


def judge(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Calls the reward function and returns a message with its outcome, or with the failure."""
    try:
        outcome = read_outcome(function(**arguments))
    except RewardFailure as failure:
        return failure_message(failure.reason, failure, words_of(failure, function))
    except BaseException as error:  # the reward boundary: sys.exit() in a reward is a failure of the reward
        return failure_message("reward_raised", error)
    return {
        "value": outcome.value,
        "rewards": outcome.rewards,
        "accuracy": outcome.accuracy,
        "answer": outcome.answer,
        "extracted": outcome.extracted,
    }


def main(spec: str) -> None:
    """Serves the reward function ``spec`` until the run closes its end of the socket."""

    def load() -> Answering:
        function = adapted(load_function(spec))
        return lambda arguments: judge(function, arguments)

    serve(load, reason="reward_raised", tidy=True)
