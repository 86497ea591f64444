"""What an engine was sent and returned, noted below the workflow, against what a batch trains."""

import torch
from transformers import AutoModelForCausalLM

from tandem.api.workflow import RolloutWorkflow
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.opening import open_rows, open_session
from tandem.flow.process import start_process
from tandem.rollout.workflows import Repeated
from tests.rollout.scripted import untruthful


class Witness:
    """The log of what the engine was sent and returned."""

    def __init__(self, engine):
        self.engine, self.log = engine, []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def agenerate(self, request):
        response = await self.engine.agenerate(request)
        self.log.append((request, response))
        return response


class Witnessed(RolloutWorkflow):
    """Runs a workflow with a witness for each sample."""

    def __init__(self, workflow):
        self.workflow, self.log = workflow, []

    async def arun_episode(self, engine, data):
        witness = Witness(engine)
        sample = await self.workflow.arun_episode(witness, data)
        self.log += witness.log
        return sample


class Piece:
    """One sequence of a batch."""

    def __init__(self, batch, place):
        self.ids, self.mask, self.logprobs, self.versions = (
            batch[name][place].tolist() for name in ("input_ids", "loss_mask", "rollout_logprobs", "versions")
        )


def witnessed_batch(items):
    """The first batch of a run: its sequences, the engine's log, and the metrics of the rollout."""
    config = load_config(TrainConfig, None, items).config
    with open_session(config, start_process(config), open_rows(config), 1, "test/witness") as session:
        workflow = Witnessed(session.workflow.workflow)
        batch = session.rollout.prepare_batch(session.loader, Repeated(workflow, config.gconfig.n_samples))
        metrics = session.rollout.metrics()
    bounds = batch["cu_seqlens"].tolist()
    return [Piece(batch, slice(*pair)) for pair in zip(bounds, bounds[1:], strict=False)], workflow, metrics


def assert_trained_as_sampled(pieces, workflow, model):
    """All that was sampled is trained, in the context in which it was sampled, at the model's own log-probabilities."""
    assert sum(sum(piece.mask) for piece in pieces) == sum(len(response.output_ids) for _, response in workflow.log)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for piece in pieces:
        assert untruthful(workflow, piece) == []
        with torch.no_grad():
            logits = reference(torch.tensor([piece.ids])).logits[0]
        scores = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(piece.ids[1:])[:, None])[:, 0]
        mask = torch.tensor(piece.mask[1:])
        assert (scores - torch.tensor(piece.logprobs[1:]))[mask].abs().max() <= 1e-4
