"""Rollout workers: the batches and ledger of one process, also when one of them dies on the way."""

import asyncio
import pickle
import queue
import threading
import time

import pytest

from tandem.api.failures import DataFailure, EngineDied, WaitTimeout
from tandem.api.requests import LLMRequest
from tandem.api.weights import WeightVersion
from tandem.api.workflow import RolloutWorkflow, Sample
from tandem.config.rollout import GenerationConfig, RolloutConfig
from tandem.flow.pool import EpisodeWorker
from tandem.rollout.executor import Rollout
from tandem.rollout.remote_episodes import RolloutWorkers
from tandem.rollout.workflows import Repeated, Tokens
from tests.rollout.clockwork import ClockworkEngine, OneAnswer, prompts, rows


class Uneven(OneAnswer):
    """Rows ask for failures by name, and for a while before the request."""

    async def arun_episode(self, engine, data):
        if data["tandem.index"] == 5:
            raise DataFailure("bad_row", "as row 5 is")
        if data["tandem.index"] == data.get("dies"):
            raise EngineDied("the clockwork has stopped")
        return await super().arun_episode(engine, data)


class SlowTool(RolloutWorkflow):
    """Two requests; between them every fourth row waits for its tool, so that a wave is open for half a second."""

    async def arun_episode(self, engine, data):
        tokens = Tokens([1, data["tandem.index"]])
        for turn in range(2):
            if turn and data["tandem.index"] % 4 == 2:
                await asyncio.sleep(0.5)
            tokens.add_response(await engine.agenerate(LLMRequest(tuple(tokens.ids), GenerationConfig())))
        return Sample((tokens.trajectory(),), reward=1.0)


class Threads:
    """Workers in threads of this process, with the queues of processes; `kill` is a death that nobody was told of."""

    def __init__(self, count, workflow, config, **how):
        self.workflow, self.config, self.how = workflow, config, how
        self.boxes = {}
        self.hub = RolloutWorkers(*([self.sends(kind, n) for n in range(1, count + 1)] for kind in ("order", "answer")))
        self.hub.workflow, self.living = workflow, {}
        for place in range(1, count + 1):
            self.live(place)

    def sends(self, kind, place):
        return lambda message: self.boxes[kind, place].put(pickle.dumps(message))

    def live(self, place):
        worker = EpisodeWorker(self.config, frozenset({"noise_key"}), WeightVersion(0), **self.how)
        self.living[place] = worker
        work = {
            "order": lambda message: worker.take(message, self.workflow),
            "answer": lambda message: worker.engine.answer(*message),
        }
        for kind, does in work.items():
            box = self.boxes[kind, place] = queue.SimpleQueue()
            threading.Thread(target=self.obey, args=(place, worker, box, does), daemon=True).start()
        threading.Thread(target=self.listen, args=(place, worker), daemon=True).start()

    def obey(self, place, worker, box, does):
        while True:
            message = pickle.loads(box.get())
            if self.living.get(place) is not worker:
                return
            does(message)

    def listen(self, place, worker):
        while True:
            message = worker.said.get()
            if self.living.get(place) is not worker:
                return
            self.hub.heard(place, message)

    def kill(self, place, again=True):
        old = self.living.pop(place)
        time.sleep(0.05)
        threading.Thread(target=self.bury, args=[old], daemon=True).start()
        self.hub.gone(place)
        if again:
            self.live(place)
            self.hub.back(place)

    def bury(self, old):
        """A process that is killed has no threads that wait."""
        closing = threading.Thread(target=old.close, daemon=True)
        closing.start()
        for _ in range(20):
            for number in range(-1, -99, -1):
                old.engine.answer(number, EngineDied("killed"))
            closing.join(0.05)


class OnePauseFails(ClockworkEngine):
    def __init__(self, **how):
        super().__init__(**how)
        self.pauses = 0

    def pause(self):
        self.pauses += 1
        if self.pauses == 2:
            raise WaitTimeout("the clockwork does not stand still")
        super().pause()


def collected(
    count, *, deterministic, killed=(), again=True, steps=3, workflow=None, after_s=0.01, kind=ClockworkEngine, **columns
):
    """Groups, counts and requests of some batches of four; workers of ``killed`` die in the second, one ``after_s`` after
    another."""
    config = RolloutConfig(batch_size=4, max_concurrent=6, wait_timeout_s=60.0)
    engine, workflow = kind(delay_s=lambda request: 0.02), Repeated(workflow or Uneven(), 2)
    how = {"seed": 3, "deterministic": deterministic}
    threads = Threads(count, workflow, config, **how) if count else None
    found = []
    with Rollout(engine, config, workers=threads and threads.hub, **how) as rollout:
        loader = iter(rows(30, **columns))
        for step in range(steps):
            if step == 1:
                for place in killed:
                    threading.Timer(after_s * place, threads.kill, (place, again)).start()
            batch = rollout.prepare_batch(loader, workflow)
            found.append([prompts(batch)[i : i + 2] for i in range(0, 8, 2)])
            rollout.end_step()
        counts = {n: v for n, v in rollout.metrics().items() if n.startswith(("episodes/dropped", "episodes/trained"))}
        return found, counts, dict(rollout.ledger.dropped), engine


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("killed", [(), (1,), (1, 2)], ids=str)
def test_workers_make_the_batches_and_ledger_of_one_process(deterministic, killed):
    alone = collected(0, deterministic=deterministic)
    theirs = collected(2, deterministic=deterministic, killed=killed)
    if deterministic:
        assert theirs[:3] == alone[:3]
    else:  # the order in which groups end decides which are taken
        trained = [index for batch in theirs[0] for index, _ in batch]
        assert len(set(trained)) == len(trained) == 12 and theirs[1]["episodes/trained"] == 12
    assert theirs[3].paused == 0


def test_one_worker_is_enough_for_the_episodes_of_another_that_does_not_come_back():
    alone, theirs = collected(0, deterministic=True), collected(2, deterministic=True, killed=(2,), again=False)
    assert theirs[:3] == alone[:3]


def test_what_fails_in_a_worker_ends_the_run_with_its_error():
    with pytest.raises(EngineDied, match="the clockwork has stopped"):
        collected(2, deterministic=False, dies=1)


@pytest.mark.parametrize("killed", [1, 2])
def test_a_worker_that_dies_in_the_middle_of_a_turn_holds_up_nobody(killed):
    """The others wait for it in a thread of theirs, which must hear that the wave has begun again."""
    alone = collected(0, deterministic=True, workflow=SlowTool(), steps=2)
    theirs = collected(2, deterministic=True, killed=(killed,), workflow=SlowTool(), steps=2, after_s=0.15 / killed)
    assert theirs[:3] == alone[:3] and theirs[3].paused == 0
    assert len(theirs[3].requests) > len(alone[3].requests)  # the wave did begin again


def test_the_next_turn_begins_after_one_for_which_the_engine_did_not_stand_still():
    (alone, *_), (theirs, counts, dropped, engine) = (
        collected(count, deterministic=True, workflow=SlowTool(), steps=2, kind=OnePauseFails) for count in (0, 2)
    )
    assert theirs == alone and counts["episodes/trained"] == 8 and not dropped
    assert engine.pauses > 2 and engine.paused == 0
