"""From a configuration to the recipe of its training, for everything that learns from rows."""

from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, SFTConfig
from tandem.config.preference import PreferenceConfig, RewardModelConfig
from tandem.trainers import preference, reward, sft
from tandem.trainers.supervised import Recipe


def recipe_of(config: BaseConfig) -> Recipe:
    """The recipe of SFT, of preference learning or of a reward model.

    Raises:
        ConfigError: the configuration is of none of these, or names a loss that is not known.
    """
    if isinstance(config, SFTConfig):
        return sft.RECIPE
    if isinstance(config, PreferenceConfig):
        return preference.recipe_of(config)
    if isinstance(config, RewardModelConfig):
        return reward.RECIPES[config.supervision]
    raise ConfigError(
        f"{type(config).__name__} does not learn from rows; use SFTConfig, PreferenceConfig or RewardModelConfig"
    )
