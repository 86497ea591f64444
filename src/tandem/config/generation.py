"""The sampling of completions: the `gconfig` section."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationConfig:
    """Sampling of one completion, and how many of them a prompt gets."""

    n_samples: int = 8
    """Samples of each prompt; together they form a group."""

    max_new_tokens: int = 256
    """Most tokens of a completion; one that reaches this counts as truncated."""

    min_new_tokens: int = 0
    """Stop tokens are suppressed until a completion has this many tokens."""

    temperature: float = 1.0
    """Logits are divided by this before the softmax; log-probabilities are those of the divided logits."""

    first_token_temperature: float | None = None
    """Temperature of the first token of each reply (FIRE, arXiv:2410.21236); null takes `temperature`."""

    train_first_token: bool = False
    """Also train on the token drawn at `first_token_temperature`, with its true log-probability; otherwise it is masked."""

    top_p: float = 1.0
    """Nucleus sampling: the smallest set of tokens whose probability reaches this; 1 turns it off."""

    top_k: int = 0
    """Only the k most probable tokens may be drawn; 0 turns it off."""

    greedy: bool = False
    """Take the most probable token instead of sampling."""

    stop: tuple[str, ...] = ()
    """Strings that end a completion when they appear in its text; their tokens stay in the completion."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, in addition to those of the model."""


def truncations(sampling: GenerationConfig) -> list[str]:
    """Lists the settings that draw from a part of the distribution only, as ``key=value``."""
    found = [f"gconfig.top_p={sampling.top_p:g}"] if sampling.top_p < 1 else []
    found += [f"gconfig.top_k={sampling.top_k}"] if sampling.top_k > 0 else []
    return found + ([f"gconfig.min_new_tokens={sampling.min_new_tokens}"] if sampling.min_new_tokens > 0 else [])
