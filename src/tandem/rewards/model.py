"""A reward model as a reward: the folder that `tandem reward` wrote, or any classifier of one label."""

import torch
from tensordict import TensorDict

from tandem.api.engines import TrainEngine
from tandem.api.scoring import FrozenModel, Score
from tandem.config.errors import ConfigError


class ModelReward(Score):
    """The scalar that a reward model gives the whole conversation, read after its last token.

    The conversation is rendered by the reward model's own tokenizer and chat template, so it may be of another family than
    the actor. ``path``: its folder. ``name``: its name in metrics, where a reward has several. ``center`` is subtracted, and
    ``scale`` divides: rewards of pairs have no zero and no unit of their own. ``above``: the reward is 1 where this is
    exceeded, else 0. ``backend``: how the model is spread, as `FrozenModel.backend`.
    """

    def __init__(
        self,
        path: str,
        name: str = "model",
        center: float = 0.0,
        scale: float = 1.0,
        above: float | None = None,
        backend: str | None = None,
    ):
        if scale <= 0:
            raise ConfigError(f"reward model({path}): scale must be above 0, got {scale}")
        self.model = FrozenModel(path, head="scalar", backend=backend)
        self.name, self.center, self.scale, self.above = name, center, scale, above

    def score(self, batch: TensorDict, model: TrainEngine) -> torch.Tensor:
        """(score − center) / scale of each sequence, or whether that is above the threshold, ``[N]``."""
        scores = model.forward(batch).scores
        assert scores is not None, "its head is scalar"
        scores = (scores[batch["cu_seqlens"][1:] - 1] - self.center) / self.scale
        return scores if self.above is None else torch.where(scores.isfinite(), (scores > self.above).to(scores), scores)
