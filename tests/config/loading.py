"""Loading a configuration of a few overrides, and what its refusal says."""

import pytest

from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config

DATA = "train_dataset.path=addition"


def load(*overrides, cls=TrainConfig):
    return load_config(cls, None, [DATA, *overrides]).config


def assert_refused(overrides, words):
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    for word in words:
        assert word in str(error.value)
