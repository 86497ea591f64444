"""Agents that nobody here wrote, eight episodes at once, through the recorder: trained is what the engine saw and made.

Needs the environments of ``scripts/foreign_agents.sh``; an agent that is not there is skipped.
"""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.rollout.recorder import SessionRecorder
from tests.docs.test_tools_page import AGENTS, snippet
from tests.foreign.forced import GCONFIG, forced_engine, long_model_folder, rescored
from tests.foreign.peers import PEERS, Peer, adding
from tests.rollout.scripted import user

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return long_model_folder(tmp_path_factory.mktemp("long"), resolve("smollm2-135m"))


async def played(peer, folder, engine, place):
    """The answers, and the sessions that are over."""
    recorder = SessionRecorder(load_tokenizer(folder))
    try:
        async with AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(recorder.session(engine, GCONFIG)) for _ in range(peer.episodes)]
            given = [
                {"base_url": s.base_url, "key": s.key, "question": f"What is {i} + {i + 20}? Then add 1."}
                for i, s in enumerate(sessions)
            ]
            return await peer.play(given, place), sessions
    finally:
        recorder.close()


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_an_agent_is_trained_on_what_the_engine_saw_and_made(peer, folder, tmp_path):
    if not peer.there:
        pytest.skip(f"{peer.program} is not there; scripts/foreign_agents.sh makes it")
    check(peer, folder, tmp_path)


class Solver(Peer):
    """The agent of docs/agents.md that calls tools in a loop of its own; it says only whether the answer is right."""

    async def play(self, sessions, folder):
        rows = [
            {"messages": [user(session["question"])], "answer": f"It is {2 * i + 21}."} for i, session in enumerate(sessions)
        ]
        agent = snippet(AGENTS, "my_solver.py")["agent"]
        played = (agent(session["base_url"], session["key"], row) for session, row in zip(sessions, rows, strict=True))
        return [row["answer"] if right else "wrong" for row, right in zip(rows, await asyncio.gather(*played), strict=True)]


@pytest.mark.invariant
def test_a_loop_of_ones_own_is_trained_on_what_the_engine_saw_and_made(folder, tmp_path):
    check(Solver("a loop of one's own", "chat", "", adding), folder, tmp_path)


def check(peer, folder, tmp_path):
    """Plays the agent's episodes, and compares what would be trained with the engine's log and the model."""
    with forced_engine(folder, peer.script) as engine:
        answers, sessions = asyncio.run(played(peer, folder, engine, tmp_path))

    assert answers == [f"It is {2 * i + 21}." for i in range(peer.episodes)]
    untrained = {request + output: request for request, output in engine.log}
    for session in sessions:
        sample = session.sample(1.0)
        got = {name.rpartition("/")[2]: value for name, value in sample.metrics.items()}
        assert (got["roots"], got["turns"], got["side_calls"]) == (peer.roots, peer.turns, peer.side_calls)
        assert got["orphans"] == got["retries"] == 0 and len(sample.trajectories) == peer.roots
        for trajectory in sample.trajectories:
            ids, mask = tuple(trajectory.input_ids.tolist()), trajectory.loss_mask
            spans = list(trained_spans(mask.tolist()))
            assert spans[-1][1] == len(ids)
            for start, end in spans:  # each is what the engine returned to exactly what stands before it, trained once
                assert len(untrained.pop(ids[:end])) == start
            drawn = rescored(folder, trajectory) - trajectory.rollout_logprobs[mask]
            assert drawn.abs().max() <= 1e-4
    assert len(engine.log) == peer.episodes * (peer.turns + peer.side_calls)
    assert len(untrained) == peer.episodes * peer.side_calls


def trained_spans(mask):
    """Start and end of each run of trained tokens."""
    edges = [place for place, (before, now) in enumerate(zip([False, *mask], [*mask, False], strict=True)) if before != now]
    return zip(edges[::2], edges[1::2], strict=True)
