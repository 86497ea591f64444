"""The two splits of a data set that Tandem computes or puts together."""

from tandem.config.errors import ConfigError


def check_split(name: str, split: str) -> None:
    """Passes for `train` and `test`.

    Raises:
        ConfigError: another split.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"data set {name} has the splits train and test, got {split!r}")
