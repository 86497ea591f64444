"""The executor: runs episodes as the staleness gate admits them, and returns batches of their groups, the oldest first.

Takes rows and returns packed batches. Episodes run on one event loop in a background thread, so generation continues while
the caller trains. A call waits at most `rollout.wait_timeout_s` seconds. `end_step` frees places in the gate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tensordict import TensorDict

from tandem.api.engines import InferenceEngine
from tandem.api.team import Team
from tandem.api.workflow import Dropped, Group, GroupScorer, RolloutWorkflow
from tandem.config.errors import ConfigError
from tandem.config.rollout import RolloutConfig
from tandem.rollout.batch_statistics import batch_metrics
from tandem.rollout.collate import collate
from tandem.rollout.episode_pool import EpisodePool, GroupFilter, GroupObserver, Row, Wish
from tandem.rollout.remote_episodes import RankHelper, RolloutWorkers
from tandem.rollout.replay import Replay

MAX_DRAWS = 10
"""Maximum number of groups drawn for one batch, in batch sizes. If the group filter leaves too few, the run ends."""


class Rollout:
    """Makes batches: `rollout_batch` from given rows, `prepare_batch` from a loader, `wait` from rows queued by `submit`.

    Call ``end_step`` when a batch was trained on and the new weights are published. ``max_head_offpolicyness`` (η) overrides
    the configuration's (null there means 0). Tokens older than η versions at consumption are handled as `on_expiry` says:

    - ``mask``: these tokens are marked ``expired`` in the batch;
    - ``drop``: the group is dropped with reason ``expired``, and another one takes its place;
    - ``wait``: a batch is returned only if it contains every episode that would exceed η in the next one: those started at
      version ≤ now − η. By the gate's inequality these are the oldest and at most B, so no token expires.

    With `replay.groups`, groups of earlier batches join each batch; gate and ledger count only their first use.

    All methods must be called from one thread. Under ``torch.distributed`` the batch methods are collective, and ranks other
    than 0 pass ``engine=None``. ``max_draws`` limits how many groups ``group_filter`` may reject for one batch, as a
    multiple of the batch size; ``observer`` is called with each group when it enters a batch or is dropped.
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
        """``scorer``: if true, adds rewards of models to finished groups. ``team``: the ranks that get batches; None: all.
        ``generators``: the ranks with an ``engine``; None: rank 0 only. ``workers``: other processes that run episodes."""
        self._eta = (config.max_head_offpolicyness if max_head_offpolicyness is None else max_head_offpolicyness) or 0
        if self._eta and (deterministic or config.oversample > 1):
            setting = "deterministic=true" if deterministic else f"rollout.oversample={config.oversample:g}"
            raise ConfigError(f"{setting} is for synchronous training, got rollout.max_head_offpolicyness={self._eta}")
        self._engine, self._config, self._scorer, self._team = engine, config, scorer, team or Team()
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

    def submit(self, data: Row, workflow: RolloutWorkflow) -> None:
        """Queues one episode, which starts as soon as the gate admits it. Rank 0 only."""
        self._pool.submit([data], workflow, start=True)

    def wait(self, count: int, timeout_s: float | None = None) -> TensorDict:
        """Returns a batch of the oldest ``count`` groups of the submitted rows. Collective.

        Raises:
            WaitTimeout: after ``timeout_s`` seconds (default `rollout.wait_timeout_s`); the message says what is missing.
            NoBatch: there will never be ``count`` groups.
            EngineDied: the engine has died.
        """
        return self._batch(lambda: count, timeout_s=timeout_s)

    def rollout_batch(self, data: Sequence[Row], workflow: RolloutWorkflow) -> TensorDict:
        """Runs at most `rollout.batch_size` (times `oversample`) rows; returns a batch of their groups in order. Collective.

        Dropped rows are missing from the batch. Raises as `wait`; `NoBatch` if all rows were dropped.
        """

        def begin() -> int:
            most = self.gate.batch_size
            if not 0 < len(data) <= most:
                raise ConfigError(f"rollout_batch takes 1 to {most} rows (rollout.batch_size), got {len(data)}")
            self._pool.submit(data, workflow)
            return min(len(data), self._config.batch_size)

        return self._batch(begin, workflow, partial=True)

    def prepare_batch(self, loader: Iterator[Row], workflow: RolloutWorkflow) -> TensorDict:
        """Returns the next batch of `rollout.batch_size` groups. Draws rows from the loader as the gate admits. Collective.

        At η > 0 episodes continue, and new ones start, while the caller trains. Raises as `wait`.
        """

        def begin() -> int:
            self._pool.draw_from(loader, workflow)
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
            wish.outcomes = self._scorer([episode.group for episode in wish.candidates if episode.group is not None])
            if self._team.share(lambda: self._pool.judge(wish)):
                self._scorer.generate_again()
        return self._team.share(lambda: self._packed(wish))

    def _collected(self, wish: Wish) -> int:
        """Collects groups on rank 0, while others run episodes; returns how many need rewards of a model. Collective."""
        if self._helper is not None and wish.workflow is not None:
            self._helper.serve(wish.workflow)
        return self._team.share(lambda: self._pool.collect(wish))

    def _packed(self, wish: Wish) -> TensorDict:
        """Packs the collected groups into a batch. Rank 0 only."""
        assert self._engine is not None
        version = self._engine.version.number
        self.last_groups = tuple(episode.group for episode in wish.episodes if episode.group is not None)
        replayed, max_age = self.replay.draw(version), self._config.replay.max_age
        batch = collate(
            self.last_groups, version=version, max_head_offpolicyness=self._eta, replayed=replayed, max_age=max_age
        )
        self.replay.add(self.last_groups)
        self._metrics = wish.metrics | batch_metrics(self.last_groups, batch, version=version) | self.replay.metrics(version)
        return batch

    def end_step(self) -> None:
        """Frees the places of the batch's episodes. Call it after the weights trained on the batch were published."""
        if self._team.main:
            self._pool.end_step()

    def fail(self, error: Exception) -> None:
        """Raises this error for all who wait for a batch now or later. May be called from any thread."""
        self._pool.fail(error)

    def begin_again(self) -> None:
        """Restarts episodes whose group is running or not fully judged, because the reward has changed."""
        with self._pool.locked() as book:
            book.begin_again()

    def take_dropped(self) -> tuple[Dropped, ...]:
        """Returns the prompts dropped since the last call, for the record of a step; empty on ranks other than 0."""
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
        """Returns the state (`Stateful`). Call between steps; if episodes continue then, inside `standing_still`.

        After the state is loaded, prompts whose episodes had started and not ended begin again. The other prompts are in
        `ledger`, which is saved separately.
        """
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
