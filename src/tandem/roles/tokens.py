"""The choice of tokens that are trained on: made once for the whole batch, before the update, so that no micro-batch makes
it."""

from __future__ import annotations

from tandem.algorithms.noise import token_noise
from tandem.algorithms.registry import TOKEN_FILTERS
from tandem.api.batch import per_token, sequence_index
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch
from tandem.config.algorithm import AlgorithmConfig
from tandem.roles.components import Choice, choose
from tandem.roles.samples import trained_tokens

FIELD = {"proximal": "proximal_logprobs", "rollout": "rollout_logprobs", "entropy": "entropy"}


class TokenChoice:
    """The token filter, and what the policy loss prepares."""

    def __init__(self, algorithm: AlgorithmConfig, seed: int, preparation: Choice | None):
        """``seed``: of the noise that breaks ties and draws at random. ``preparation``: that of the policy loss.

        Raises:
            ConfigError: the filter is not known.
        """
        self.seed, self.preparation = seed, preparation
        self.filter = choose(TOKEN_FILTERS, algorithm.token_filter, "algorithm.token_filter")

    @property
    def needs_proximal(self) -> bool:
        """True if the pass before the update has to run."""
        chosen = [self.filter, *([self.preparation] if self.preparation else [])]
        return any(name in choice.asked for choice in chosen for name in ("proximal", "entropy"))

    def filtered(self, batch: TensorDict, step: int) -> torch.Tensor:
        """Tokens that the filter takes out of the loss, ``[T]`` bool."""
        mask = self._mask(batch)
        return mask & ~self._call(self.filter, batch, mask, step) if self.filter.name != "none" else torch.zeros_like(mask)

    def prepared(self, batch: TensorDict, step: int) -> dict[str, torch.Tensor]:
        """``prepared [T]``, where the policy loss asks for it; the batch has ``advantages`` and ``dropped``."""
        if self.preparation is None:
            return {}
        mask = self._mask(batch) & ~batch["dropped"]
        return {"prepared": self._call(self.preparation, batch, mask, step).to(torch.float32)}

    def _mask(self, batch: TensorDict) -> torch.Tensor:
        mask = trained_tokens(batch)
        return mask & per_token(batch, batch["in_loss"]) if "in_loss" in batch.keys() else mask

    def _call(self, choice: Choice, batch: TensorDict, mask: torch.Tensor, step: int) -> torch.Tensor:
        tensors = {"mask": mask, "sequence": sequence_index(batch)}
        for name in set(choice.asked) - set(tensors) - {"noise"}:
            field = FIELD.get(name, name)
            if field not in batch.keys():
                raise BatchError(f"the batch has no {field}, which {choice.name} needs; call compute_proximal(batch) before")
            tensors[name] = batch[field]
        if "noise" in choice.asked:
            ids = batch["group_id"], batch["sample_id"], batch["input_ids"], batch["cu_seqlens"]
            tensors["noise"] = token_noise(self.seed, step, *ids)
        return choice(**tensors)


def kl_in_reward(algorithm: AlgorithmConfig) -> bool:
    """True if the distance to the reference is subtracted from the reward, and not added to the loss."""
    return algorithm.kl.coefficient > 0 and algorithm.kl.where == "reward"


def needs_proximal(algorithm: AlgorithmConfig, updates_per_batch: int, tokens: TokenChoice) -> bool:
    """True if the log-probabilities of before the update have to be computed in a pass of their own.

    With one optimizer step a batch the policy of that step *is* the proximal one, and stands in for it in ratio, behaviour
    correction and rejection, all of which are per trajectory. KL in the reward, a coefficient that follows the KL, and a
    choice among the tokens of the whole batch need it earlier.
    """
    follows = algorithm.kl.target is not None
    return updates_per_batch > 1 or kl_in_reward(algorithm) or follows or tokens.needs_proximal
