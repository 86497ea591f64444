"""Memory of a GPU that a trainer and servers share, with a pretended one: who has how much of it, and in which order."""

import threading

import pytest
import torch

from tandem.api.engines import InferenceEngine
from tandem.api.failures import NoRoom, RankFailed
from tandem.api.team import Team
from tandem.flow.residency import Residency
from tandem.flow.sleep_plan import AGAIN, GIB, Part, PartCost, SleepPlan, StageNeeds
from tandem.models.allocator import give_back
from tandem.tracking.statistics import PhaseTimer
from tests.engines_train.steps import engine_on
from tests.pretended_gpu import GPU, pretended_gpu
from tests.tiny import tiny_model_folder

TOTAL, SERVER, CACHE = 80 * GIB, 5 * GIB, 30 * GIB
CONTEXT = GIB
"""What the driver takes for a process."""


class Gpus:
    """A GPU a rank, which is a thread: bytes that torch keeps there, tensors among them, and those of a server."""

    def __init__(self, ranks):
        self.names = [f"rank {rank}" for rank in range(ranks)]
        self.tensors, self.kept, self.cache = [0] * ranks, [0] * ranks, [CACHE] * ranks
        self.events = []

    @property
    def rank(self):
        name = threading.current_thread().name
        return self.names.index(name) if name in self.names else 0

    def free(self, rank):
        return TOTAL - 2 * CONTEXT - self.kept[rank] - SERVER - self.cache[rank]

    def holds(self, tensors, kept):
        """This rank's torch has so many bytes of tensors now, and has taken so many."""
        self.tensors[self.rank], self.kept[self.rank] = tensors, kept

    def empty(self):
        self.events.append(f"rank {self.rank} gives back")
        self.kept[self.rank] = self.tensors[self.rank]

    def sleep(self):
        self.events.append("servers sleep")
        self.cache = [0] * len(self.cache)

    def wake(self):
        self.events.append("servers wake")
        for rank in range(len(self.cache)):
            if self.free(rank) < CACHE:
                raise MemoryError(f"cuMemCreate: out of memory on the GPU of rank {rank}")
        self.cache = [CACHE] * len(self.cache)


@pytest.fixture
def gpus(monkeypatch):
    def made(ranks=1):
        here = Gpus(ranks)
        for name, function in {
            "is_initialized": lambda: True,
            "synchronize": lambda: here.events.append(f"rank {here.rank} waits for its kernels"),
            "empty_cache": here.empty,
            "mem_get_info": lambda: (here.free(here.rank), TOTAL),
            "memory_reserved": lambda: here.kept[here.rank],
            "memory_allocated": lambda: here.tensors[here.rank],
            "current_device": lambda: here.rank,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        return here

    return made


class Servers(InferenceEngine):
    """One on each GPU."""

    def __init__(self, gpus):
        self.gpus = gpus

    agenerate = version = capabilities = prepare_weights = commit_weights = discard_weights = None
    pause = resume = close = None

    def statistics(self):
        return {}

    def sleep(self, parts):
        self.gpus.sleep()

    def wake(self, parts):
        self.gpus.wake()


class Ranks(Team):
    """Threads that meet."""

    def __init__(self, rank, meeting, board):
        super().__init__()
        self._rank, self._meeting, self._board = rank, meeting, board

    size = property(lambda self: self._meeting.parties)
    rank = property(lambda self: self._rank)

    def portable(self, error):
        return RankFailed(str(error))

    def gather(self, own):
        self._board[self._rank] = own
        self._meeting.wait(20)
        everybody = list(self._board)
        self._meeting.wait(20)
        return everybody


def plan(weights_sleep=False):
    cache, weights = Part("engine", "kv_cache"), Part("engine", "weights")
    parts = {cache: PartCost(CACHE, 0, 0, standing=True)} | ({weights: PartCost(SERVER, 0, SERVER)} if weights_sleep else {})
    stages = (
        StageNeeds(AGAIN, gives=frozenset({weights}) if weights_sleep else frozenset(), each_step=False),
        StageNeeds("generate", frozenset({cache})),
        StageNeeds("train", away=frozenset({cache})),
        StageNeeds("publish", away=frozenset({cache}), gives=frozenset({weights}) if weights_sleep else frozenset()),
    )
    return SleepPlan(parts, stages, one_memory=False)


def residency(gpus, folder, team=None, **terms):
    made = Residency(plan(**terms), folder, PhaseTimer(), lambda *_, **__: None, team)
    made.add_engine(Servers(gpus) if team is None or team.rank == 0 else None)
    return made


def test_what_torch_kept_of_training_is_free_before_servers_take_their_cache_again(gpus, tmp_path):
    here = gpus()
    one = residency(here, tmp_path)
    for _ in range(3):
        one.enter("generate")
        assert here.cache == [CACHE]
        one.enter("train")
        here.holds(28 * GIB, 52 * GIB)
    wakes = [i for i, event in enumerate(here.events) if event == "servers wake"]
    assert len(wakes) == 2  # at first they are awake
    for i in wakes:
        assert here.events[i - 2 : i] == ["rank 0 waits for its kernels", "rank 0 gives back"]


def test_every_rank_has_given_back_before_the_first_server_wakes(gpus, tmp_path):
    here, meeting, board = gpus(3), threading.Barrier(3), [None] * 3
    empty, errors = here.empty, []

    def slowly():
        threading.Event().wait(0.05 * here.rank)
        empty()

    torch.cuda.empty_cache = slowly  # the fixture puts torch's own back

    def rank(number):
        try:
            one = residency(here, tmp_path, Ranks(number, meeting, board))
            for _ in range(2):
                one.enter("generate")
                one.enter("train")
                here.holds(20 * GIB, 60 * GIB)
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=rank, args=(number,), name=f"rank {number}") for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    before = here.events[: here.events.index("servers wake")]
    last = before[max(i for i, event in enumerate(before) if event == "servers sleep") :]
    assert {event for event in last if "gives back" in event} == {f"rank {number} gives back" for number in range(3)}


def test_a_cache_that_does_not_fit_is_refused_with_the_bytes_and_who_has_them(gpus, tmp_path):
    here = gpus()
    one = residency(here, tmp_path)
    one.enter("train")
    here.holds(50 * GIB, 61 * GIB)
    with pytest.raises(NoRoom) as refused:
        one.enter("generate")
    words = str(refused.value)
    assert "30 GiB are needed and 23 GiB are free, so 7 GiB are missing" in words
    assert "This process holds 50 GiB (50 GiB of it tensors), other processes and CUDA 7 GiB" in words
    assert "actor.max_tokens_per_micro_batch" in words and "rollout.fleet.memory_share" in words
    assert "servers wake" not in here.events


def test_weights_that_sleep_find_what_torch_kept_free_when_they_are_published(gpus, tmp_path):
    here = gpus()
    one = residency(here, tmp_path, weights_sleep=True)
    one.enter("train")
    here.events.clear()
    here.holds(28 * GIB, 52 * GIB)
    one.enter("publish")
    assert here.kept == [28 * GIB] and here.events[-1] == "rank 0 gives back"


def test_without_a_gpu_nothing_is_asked_of_it(monkeypatch):
    def touched():
        raise AssertionError("CUDA is asked")

    for name in ("synchronize", "empty_cache", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, touched)
    give_back()


@pytest.mark.parametrize("part", ["parameters", "optimizer"])
def test_a_part_that_sleeps_on_a_gpu_leaves_nothing_with_torch(tmp_path, monkeypatch, part):
    emptied = []
    with pretended_gpu():
        engine = engine_on(tiny_model_folder(tmp_path, num_hidden_layers=1), device=GPU)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(engine.num_bytes()[part]))
        engine.offload((part,))
        assert emptied == [0]
        engine.onload((part,))
        assert len(emptied) == 1
