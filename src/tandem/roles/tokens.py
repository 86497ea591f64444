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


def token_choice(algorithm: AlgorithmConfig, seed: int, preparation: Choice | None) -> TokenChoice | None:
    """The choice of tokens that an algorithm makes; None if it trains on all. Arguments are those of `TokenChoice`.

    Raises:
        ConfigError: the filter is not known.
    """
    token_filter = choose(TOKEN_FILTERS, algorithm.token_filter, "algorithm.token_filter")
    filters = token_filter.name != "none"
    return TokenChoice(token_filter if filters else None, preparation, seed) if filters or preparation else None


class TokenChoice:
    """The token filter, and what the policy loss prepares."""

    def __init__(self, token_filter: Choice | None, preparation: Choice | None, seed: int):
        """``preparation``: that of the policy loss. ``seed``: of the noise that breaks ties and draws at random."""
        self.filter, self.preparation, self.seed = token_filter, preparation, seed

    @property
    def needs_proximal(self) -> bool:
        """True if the pass before the update has to run."""
        chosen = [choice for choice in (self.filter, self.preparation) if choice is not None]
        return any(name in choice.asked for choice in chosen for name in ("proximal", "entropy"))

    def drops(self, batch: TensorDict, step: int) -> dict[str, torch.Tensor]:
        """Tokens that the filter takes out of the loss, ``[T]`` bool, under the name ``token_filter``; empty without one."""
        if self.filter is None:
            return {}
        mask = self._mask(batch)
        return {"token_filter": mask & ~self._call(self.filter, batch, mask, step)}

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
