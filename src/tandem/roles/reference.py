"""The reference: a frozen policy that the actor is kept close to."""

from tensordict import TensorDict

from tandem.api.engines import TrainEngine
from tandem.api.stage import stage
from tandem.roles.samples import with_fields


class Reference:
    """An engine whose weights nobody changes."""

    def __init__(self, engine: TrainEngine):
        self.engine = engine

    @stage(reads=("input_ids", "loss_mask", "temperature"), adds=("reference_logprobs",), reads_state=("weights",))
    def compute_logprobs(self, batch: TensorDict) -> TensorDict:
        """Adds ``reference_logprobs``, at each trajectory's temperature."""
        return with_fields(batch, reference_logprobs=self.engine.forward(batch).logprobs)
