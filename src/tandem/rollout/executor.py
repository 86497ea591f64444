"""The executor: runs episodes as the staleness gate admits them, and packs their groups, the oldest first, into batches.

Episodes run on one event loop in a background thread, so generation continues while the caller trains.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import TensorDict

from tandem.api.batch import pack
from tandem.api.engines import InferenceEngine
from tandem.api.team import Team
from tandem.api.workflow import Dropped, Group, GroupScorer, RolloutWorkflow
from tandem.config.errors import ConfigError
from tandem.config.rollout import RolloutConfig
from tandem.rollout.batch_statistics import batch_metrics
from tandem.rollout.episode_pool import EpisodePool, GroupFilter, GroupObserver, Wish
from tandem.rollout.remote_episodes import RankHelper, RolloutWorkers
from tandem.rollout.replay import Replay

MAX_DRAWS = 10
"""Maximum number of groups drawn for one batch, in batch sizes. If the group filter leaves too few, the run ends."""


class Rollout:
    """Makes batches: `prepare_batch` from a loader, `rollout_batch` from given rows, `wait` from rows queued by `submit`.

    Call ``end_step`` when a batch was trained on and the new weights are published. `rollout.on_expiry` says what becomes of
    tokens that are older than η versions when their batch is made. With ``wait`` there are none: a batch has every episode
    that would exceed η in the next one, those started at version ≤ now − η; by the gate's inequality these are the oldest,
    and at most B. With `replay.groups`, groups of earlier batches join; gate and ledger count only their first use.

    All methods must be called from one thread. Under ``torch.distributed`` the batch methods are collective, and ranks other
    than 0 pass ``engine=None``.
    """

    def __init__(
        self,
        engine: InferenceEngine | None,
        config: RolloutConfig,
        *,
        seed: int = 0,
        deterministic: bool = False,
        group_filter: GroupFilter | None = None,
        max_draws: int = MAX_DRAWS,
        observer: GroupObserver | None = None,
        max_head_offpolicyness: int | None = None,
        scorer: GroupScorer | None = None,
        team: Team | None = None,
        generators: Team | None = None,
        workers: RolloutWorkers | None = None,
    ):
        """``max_draws``: limit of the groups that ``group_filter`` may reject for one batch, in batch sizes. ``observer``:
        called with each group that enters a batch or is dropped. ``max_head_offpolicyness``: η; None: the configuration's
        (null there means 0). ``scorer``: if true, adds rewards of models to finished groups. ``team``: the ranks that get
        batches; None: all. ``generators``: the ranks with an ``engine``; None: rank 0. ``workers``: other processes that run
        episodes."""
        self._eta = (config.max_head_offpolicyness if max_head_offpolicyness is None else max_head_offpolicyness) or 0
        if self._eta and (deterministic or config.oversample > 1):
            setting = "deterministic=true" if deterministic else f"rollout.oversample={config.oversample:g}"
            raise ConfigError(f"{setting} is for synchronous training, got rollout.max_head_offpolicyness={self._eta}")
        self._config, self._scorer, self._team = config, scorer, team or Team()
        self._pool = EpisodePool(
            engine,
            config,
            self._eta,
            seed=seed,
            deterministic=deterministic,
            group_filter=group_filter,
            max_draws=max_draws,
            observer=observer,
            judges_later=lambda: bool(scorer),
            generators=generators if self._team.main else None,
            workers=workers,
        )
        self._helper: RankHelper | None = None
        if generators is not None and generators.member and not generators.main:
            self._helper = RankHelper(generators, self._pool.loop, self._pool.runner, config.wait_timeout_s)
        self.gate, self.ledger, self.loop = self._pool.gate, self._pool.ledger, self._pool.loop
        self.replay = Replay(config.replay, seed=seed)
        self.last_groups: tuple[Group, ...] = ()
        self._metrics: dict[str, float] = {}

    def submit(self, data: Mapping[str, Any], workflow: RolloutWorkflow) -> None:
        """Queues one episode, which starts as soon as the gate admits it. Rank 0 only."""
        with self._pool.locked() as book:
            book.submit([data], workflow)
            self._pool.start_admitted()

    def wait(self, count: int, timeout_s: float | None = None) -> TensorDict:
        """Returns a batch of the oldest ``count`` groups of the submitted rows. Collective.

        Raises:
            WaitTimeout: after ``timeout_s`` seconds (default `rollout.wait_timeout_s`); the message says what is missing.
            NoBatch: there will never be ``count`` groups. EngineDied: the engine has died.
        """
        return self._batch(lambda: count, timeout_s=timeout_s)

    def rollout_batch(self, data: Sequence[Mapping[str, Any]], workflow: RolloutWorkflow) -> TensorDict:
        """Runs at most `rollout.batch_size` (times `oversample`) rows; returns a batch of their groups in order. Collective.

        Dropped rows are missing from the batch. Raises as `wait`; `NoBatch` if all rows were dropped.
        """

        def begin() -> int:
            most = self.gate.batch_size
            if not 0 < len(data) <= most:
                raise ConfigError(f"rollout_batch takes 1 to {most} rows (rollout.batch_size), got {len(data)}")
            with self._pool.locked() as book:
                book.submit(data, workflow)
            return min(len(data), self._config.batch_size)

        return self._batch(begin, workflow, partial=True)

    def prepare_batch(self, loader: Iterator[Mapping[str, Any]], workflow: RolloutWorkflow) -> TensorDict:
        """Returns the next batch of `rollout.batch_size` groups. Draws rows from the loader as the gate admits. Collective.

        At η > 0 episodes continue, and new ones start, while the caller trains. Raises as `wait`.
        """

        def begin() -> int:
            with self._pool.locked() as book:
                book.draw_from(loader, workflow)
            return self._config.batch_size

        return self._batch(begin, workflow)

    def _batch(
        self,
        begin: Callable[[], int],
        workflow: RolloutWorkflow | None = None,
        *,
        timeout_s: float | None = None,
        partial: bool = False,
    ) -> TensorDict:
        """Makes a batch. Rank 0 calls ``begin``, which queues rows and returns the number of groups to collect. While some
        groups need rewards of a model, all ranks score them and rank 0 collects again. Collective."""
        patience_s = self._config.wait_timeout_s if timeout_s is None else timeout_s
        wish = Wish(self._team.share(begin), partial, patience_s, workflow)
        while self._collected(wish):
            assert self._scorer is not None, "without a scorer every group is judged when it ends"
            outcomes = self._scorer([episode.group for episode in wish.candidates if episode.group is not None])
            if self._team.share(functools.partial(self._pool.judge, wish, outcomes)):
                self._scorer.generate_again()
        return self._team.share(lambda: self._packed(wish))

    def _collected(self, wish: Wish) -> int:
        """Collects groups on rank 0, while others run episodes; returns how many need rewards of a model. Collective."""
        if self._helper is not None and wish.workflow is not None:
            self._helper.serve(wish.workflow)
        return self._team.share(lambda: self._pool.collect(wish))

    def _packed(self, wish: Wish) -> TensorDict:
        """Packs the collected groups into a batch. Rank 0 only."""
        version = self._pool.version()
        groups = self.last_groups = tuple(episode.group for episode in wish.episodes if episode.group is not None)
        replayed, max_age = self.replay.draw(version), self._config.replay.max_age
        batch = collate(groups, version=version, max_head_offpolicyness=self._eta, replayed=replayed, max_age=max_age)
        self.replay.add(groups)
        self._metrics = wish.metrics | batch_metrics(groups, batch, version=version) | self.replay.metrics(version)
        return batch

    def end_step(self) -> None:
        """Frees the places of the batch's episodes. Call it after the weights trained on the batch were published."""
        if self._team.main:
            with self._pool.locked() as book:
                book.end_step()
                self._pool.start_admitted()

    def fail(self, error: Exception) -> None:
        """Raises this error for all who wait for a batch now or later. May be called from any thread."""
        self._pool.fail(error)

    def begin_again(self) -> None:
        """Restarts episodes whose group is running or not fully judged, because the reward has changed."""
        with self._pool.locked() as book:
            book.begin_again()

    def take_dropped(self) -> tuple[Dropped, ...]:
        """Returns the prompts dropped since the last call; empty on ranks other than 0."""
        with self._pool.locked() as book:
            return book.take_dropped()

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the last batch, and counts since the start; empty on ranks other than 0."""
        with self._pool.locked() as book:
            return self._metrics | book.counts() if self._team.main else {}

    def standing_still(self) -> AbstractContextManager[object]:
        """Context manager in which no episode starts, ends or takes a row, so that reads are consistent. Leave it soon."""
        return self._pool.locked()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state (`Stateful`). Call between steps; if episodes continue then, inside `standing_still`. Once it is
        loaded, prompts whose episodes had started and not ended begin again; the others are in `ledger`."""
        with self._pool.locked() as book:
            return {"pool": book.state_dict(), "replay": self.replay.state_dict()} if self._team.main else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state. Must be called before the first batch."""
        if self._team.main:
            with self._pool.locked() as book:
                book.load_state_dict(state["pool"])
            self.replay.load_state_dict(state["replay"])

    def close(self) -> None:
        """Cancels all running episodes; their prompts become pending again. Idempotent."""
        self._pool.close()

    def __enter__(self) -> "Rollout":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def collate(
    groups: Sequence[Group], *, version: int, max_head_offpolicyness: int, replayed: Sequence[Group] = (), max_age: int = 0
) -> TensorDict:
    """Packs groups into one batch: sequences in the order of groups, samples and trajectories, replayed groups last.

    ``version``: the trainer's version now. The field ``expired`` is True for trained tokens that are too old: more than
    ``max_head_offpolicyness`` versions older than ``version``, or more than ``max_age`` in ``replayed`` groups. A named
    reward that a sample lacks is NaN. The fields ``greedy``, ``replayed``, ``token_rewards`` and ``media`` exist if at least
    one sample, group or trajectory has them.
    """
    samples = [(group, sample) for group in (*groups, *replayed) for sample in group.samples]
    num_fresh = sum(len(group.samples) for group in groups)
    names = sorted({name for _, sample in samples for name in sample.rewards})
    greedy = any(sample.greedy for _, sample in samples)
    trajectories = [trajectory for _, sample in samples for trajectory in sample.trajectories]
    optional = {"token_rewards": torch.float32, "media": torch.int64}
    optional = {name: dtype for name, dtype in optional.items() if any(getattr(t, name) is not None for t in trajectories)}
    rows: list[dict[str, Any]] = []
    for sample_id, (group, sample) in enumerate(samples):
        again = sample_id >= num_fresh
        oldest = version - (max_age if again else max_head_offpolicyness)
        shared = {
            "reward": sample.reward,
            "accuracy": math.nan if sample.accuracy is None else sample.accuracy,
            "group_id": group.group_id,
            "sample_id": sample_id,
            "in_statistics": sample.in_statistics,
            "in_loss": sample.in_loss,
            **{f"rewards/{name}": sample.rewards.get(name, math.nan) for name in names},
            **({"greedy": sample.greedy} if greedy else {}),
            **({"replayed": again} if replayed else {}),
        }
        for trajectory in sample.trajectories:
            row = shared | {
                "input_ids": trajectory.input_ids,
                "loss_mask": trajectory.loss_mask,
                "rollout_logprobs": trajectory.rollout_logprobs,
                "versions": trajectory.versions,
                "expired": trajectory.older_than(oldest),
                "temperature": trajectory.temperature,
                "stop_reason": int(trajectory.stop_reason),
            }
            for name, dtype in optional.items():
                values = getattr(trajectory, name)
                row[name] = torch.zeros(len(trajectory.input_ids), dtype=dtype) if values is None else values
            rows.append(row)
    return pack(rows)
