"""Plays one environment in another Python, one that has its library: calls as lines of JSON in, results out.

PYTHONPATH=src:. OTHER/bin/python tests/rollout/elsewhere.py SPEC KNOBS
"""

import json
import sys
from functools import partial

from tandem.api.environment import InvalidAction
from tandem.config.errors import ConfigError
from tandem.rollout.environments.worker import Player

ERRORS = {"InvalidAction": InvalidAction, "ConfigError": ConfigError}


def answer(make):
    """What ``make`` returns, or its error by name."""
    try:
        print(json.dumps({"result": make()}), flush=True)
    except (InvalidAction, ConfigError) as error:
        print(json.dumps({"error": type(error).__name__, "words": str(error)}), flush=True)


if __name__ == "__main__":
    spec, knobs = sys.argv[1], json.loads(sys.argv[2])
    made = []
    answer(lambda: made.append(Player(spec, knobs)))
    for line in sys.stdin:
        answer(partial(made[0].do, **json.loads(line)))
