"""Whole runs with agents that nobody here wrote, two steps each: what is trained is what the engine was sent and drew.

Needs the environments of ``scripts/foreign_agents.sh``; an agent that is not there is skipped.
"""

import gzip
import itertools
import json

import pytest
import torch
from safetensors.torch import load

from tandem.cli.main import main
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tests.foreign.forced import ForcedSlots, long_model_folder
from tests.foreign.peers import ENVS, PEERS, SCRIPTS
from tests.foreign.test_foreign_agents import trained_spans

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FRAMEWORKS = [peer for peer in PEERS if peer.program.startswith("agents2/")]
REWARD = "def score(completion, **_):\n    return float(len(completion))\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return long_model_folder(tmp_path_factory.mktemp("long"), resolve("smollm2-135m"))


def trained(peer, folder, place, monkeypatch, script, *more):
    """The run's folder, and what its engine was sent with what it drew then."""
    if not peer.there:
        pytest.skip(f"{peer.program} is not there; scripts/foreign_agents.sh makes it")
    log = {}

    class Slots(ForcedSlots):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.force(load_tokenizer(folder), script)

        def take(self, sequence):
            super().take(sequence)
            limit = sequence.request.gconfig.max_new_tokens
            log.setdefault(tuple(sequence.request.input_ids), []).append(tuple(self.lines[sequence.slot][:limit]))

    monkeypatch.setattr("tandem.engines.inference.core.Slots", Slots)
    (place / "reward.py").write_text(REWARD)
    items = {
        "train_dataset.path": "addition",
        "actor.path": folder,
        "workflow": "program",
        "workflow_args.command": f"'{ENVS / peer.program} {SCRIPTS / 'play.py'} {peer.kind} {{prompt}}'",
        "workflow_args.reward_from": "reply",
        "sandbox": "none",
        "reward": f"{place / 'reward.py'}:score",
        "gconfig.n_samples": 2,
        "gconfig.max_new_tokens": 256,
        "rollout.batch_size": 1,
        "rollout.engine.max_model_len": 16384,
        "rollout.engine.kv_cache_gib": 0.5,
        "tracking.trajectories_per_step": "null",
        "total_train_steps": 2,
        "threads": 1,
        "run.root": place / "runs",
        "trial_name": "run",
    }
    status = main(["train", *(f"{name}={value}" for name, value in items.items()), *more])
    (run,) = (place / "runs").glob("*/run")
    return status, run, log


def read(run, step):
    """The samples' lines and the batch of a step."""
    lines = (run / f"trajectories/step_{step}.jsonl").read_text().splitlines()
    with gzip.open(run / f"batches/step_{step}.safetensors.gz") as file:
        return [json.loads(line) for line in lines], load(file.read())


@pytest.mark.parametrize("peer", FRAMEWORKS, ids=lambda peer: peer.name)
def test_a_run_trains_all_replies_of_an_agent_and_those_that_it_judges(peer, folder, tmp_path, monkeypatch):
    count = itertools.count()

    def script(prompt):  # answers differ in their length, so in their reward
        text = peer.script(prompt)
        return text.replace("It is ", f"It is {'so ' * next(count)}") if "It is " in text else text

    status, run, log = trained(peer, folder, tmp_path, monkeypatch, script)
    assert status == 0
    tokenizer, untrained = load_tokenizer(folder), {key + line: key for key, lines in log.items() for line in lines}
    assert len(untrained) == 2 * 2 * peer.turns - sum(len(lines) - len(set(lines)) for lines in log.values())
    for step in (1, 2):
        samples, batch = read(run, step)
        assert len(samples) == 2 and len({sample["reward"] for sample in samples}) == 2
        edges = list(itertools.pairwise(batch["cu_seqlens"].tolist()))
        assert len(edges) == 2 * peer.roots
        ends = []
        for start, end in edges:
            ids, mask = tuple(batch["input_ids"][start:end].tolist()), batch["loss_mask"][start:end]
            spans = list(trained_spans(mask.tolist()))
            assert spans[-1][1] == len(ids)
            for first, last in spans:  # each is what the engine drew behind exactly what stands before it
                assert ids[first:last] in log[ids[:first]]
                untrained.pop(ids[:last], None)
            ends.append(tokenizer.decode(ids[slice(*spans[-1])], skip_special_tokens=True))
            assert torch.equal(batch["advantages"][start:end] != 0, mask)
        for sample in samples:
            assert "It is " in sample["completion"] and sample["completion"] in ends
            assert sample["reward"] == len(sample["completion"])
    assert untrained == {}


def test_samples_that_a_framework_loses_to_cut_replies_are_counted_and_told(folder, tmp_path, monkeypatch, caplog):
    """Strands Agents raises on them."""
    (peer,) = (peer for peer in FRAMEWORKS if peer.name.startswith("Strands"))
    count = itertools.count()

    def script(prompt):  # the first reply is longer than it may be
        return peer.script(prompt) if next(count) else "very " * 400

    more = ["rollout.min_group_size=1", "total_train_steps=1"]
    status, run, _ = trained(peer, folder, tmp_path, monkeypatch, script, *more)
    (row,) = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    assert (status, row["samples/failed/program_failed_on_cut_reply"]) == (0, 1)
    told = caplog.text
    assert "its last reply had been cut at its length" in told and "raise gconfig.max_new_tokens" in told
