"""A reward that needs a model, for runs of tiny models."""

from tandem.api.batch import sum_by_sequence
from tandem.api.workflow import FrozenModel, Score


class Likely(Score):
    """How probable a frozen model finds the answer."""

    def __init__(self, path):
        self.model = FrozenModel(path)

    def score(self, batch, model):
        return sum_by_sequence(batch, model.forward(batch).logprobs * batch["loss_mask"])
