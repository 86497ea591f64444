"""The executor: hands out batches, the oldest first, of episodes that are kept under way as the staleness gate admits.

Consumes rows; produces packed batches. Episodes run on one event loop in a background thread, so generation goes on
while the caller trains. A batch waits for its episodes, at most `rollout.wait_timeout_s`; `end_step` unblocks the gate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tensordict import TensorDict

from tandem.api.engines import InferenceEngine
from tandem.api.samples import Dropped, Group
from tandem.api.scoring import GroupScorer
from tandem.api.team import Team
from tandem.api.workflow import RolloutWorkflow
from tandem.config.errors import ConfigError
from tandem.config.rollout import RolloutConfig
from tandem.rollout.collate import collate
from tandem.rollout.pool import EpisodePool, GroupFilter, GroupObserver, Row, Wish
from tandem.rollout.ranks import RankHelper
from tandem.rollout.replay import Replay
from tandem.rollout.statistics import batch_metrics
from tandem.rollout.workers import RolloutWorkers

MAX_DRAWS = 10
"""Times the batch size that are drawn for one batch before a filter that keeps too few ends the run."""


class Rollout:
    """``rollout_batch`` for given rows, ``prepare_batch`` for a loader, ``submit`` and ``wait`` for anything else.

    After each batch has been trained on and the new weights are published, call ``end_step``. ``max_head_offpolicyness``
    overrides the configuration's (null there means 0). What is older than that at consumption follows `on_expiry`:

    - ``mask``: those tokens are ``expired`` in the batch;
    - ``drop``: the group is dropped with reason ``expired`` and another takes its place;
    - ``wait``: a batch is handed out only when it holds every episode that would exceed η at the next one: those started
      at version ≤ now − η. By the gate's inequality they are at most B, and the oldest, so nothing ever expires.

    With `replay.groups`, groups of earlier batches join each batch; gate and ledger count their first use alone.

    All methods are for one thread; under ``torch.distributed`` the batch methods are collective, and
    ranks other than 0 bring ``engine=None``. ``max_draws`` bounds what ``group_filter`` may turn down for one batch;
    ``observer`` is told of each group when it enters a batch or is dropped.
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
        """``scorer``: gives finished groups the rewards that need a model, while it is true. ``team``: the ranks that get
        batches, or all. ``generators``: those with an ``engine``; None: rank 0 alone. ``workers``: run episodes too."""
        self._eta = (config.max_head_offpolicyness if max_head_offpolicyness is None else max_head_offpolicyness) or 0
        if self._eta and (deterministic or config.oversample > 1):
            what = "deterministic=true" if deterministic else f"rollout.oversample={config.oversample:g}"
            raise ConfigError(f"{what} is for synchronous training, got rollout.max_head_offpolicyness={self._eta}")
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
        """Queues one episode; it starts as soon as the gate admits it. Rank 0 only."""
        self._pool.submit([data], workflow, start=True)

    def wait(self, count: int, timeout_s: float | None = None) -> TensorDict:
        """The oldest ``count`` groups of what was submitted. Collective.

        Raises:
            WaitTimeout: after ``timeout_s`` (default `rollout.wait_timeout_s`); says what it waited for.
            NoBatch: so many will never come.
            EngineDied: the engine is gone.
        """
        return self._batch(lambda: count, timeout_s=timeout_s)

    def rollout_batch(self, data: Sequence[Row], workflow: RolloutWorkflow) -> TensorDict:
        """Runs these rows, at most `rollout.batch_size` (times `oversample`), and returns their groups in order. Collective.

        Rows that are dropped are missing in the batch. Raises as `wait`; `NoBatch` if none came through.
        """

        def begin() -> int:
            most = self.gate.batch_size
            if not 0 < len(data) <= most:
                raise ConfigError(f"rollout_batch takes 1 to {most} rows (rollout.batch_size), got {len(data)}")
            self._pool.submit(data, workflow)
            return min(len(data), self._config.batch_size)

        return self._batch(begin, workflow, partial=True)

    def prepare_batch(self, loader: Iterator[Row], workflow: RolloutWorkflow) -> TensorDict:
        """The next batch of `rollout.batch_size` groups, rows drawn from the loader as the gate admits. Collective.

        At η > 0 episodes go on, and new ones start, while the caller trains. Raises as `wait`.
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
        """Rank 0 queues rows and collects as many groups as ``begin`` says. While some of them need the rewards of a model,
        all ranks score these, and rank 0 collects again. Then it packs the batch. Collective. ``workflow``: of the rows."""
        patience_s = self._config.wait_timeout_s if timeout_s is None else timeout_s
        wish = Wish(self._team.share(begin), partial, patience_s, workflow)
        while self._collected(wish):
            assert self._scorer is not None, "without a scorer every group is judged as it ends"
            wish.outcomes = self._scorer([episode.group for episode in wish.candidates if episode.group is not None])
            if self._team.share(lambda: self._pool.judge(wish)):
                self._scorer.generate_again()
        return self._team.share(lambda: self._packed(wish))

    def _collected(self, wish: Wish) -> int:
        """Number of groups that still need a model's rewards. While rank 0 collects, others run episodes. Collective."""
        if self._helper is not None and wish.workflow is not None:
            self._helper.serve(wish.workflow)
        return self._team.share(lambda: self._pool.collect(wish))

    def _packed(self, wish: Wish) -> TensorDict:
        """Rank 0: makes a batch of the groups that were taken."""
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
        """The batch was trained on and its weights are published: its episodes make room for others."""
        if self._team.main:
            self._pool.end_step()

    def fail(self, error: Exception) -> None:
        """Whoever waits for a batch, now or later, gets this error. For any thread."""
        self._pool.fail(error)

    def begin_again(self) -> None:
        """Begins episodes that run, and groups that are not judged whole, again, because the reward has changed."""
        with self._pool.locked() as book:
            book.begin_again()

    def take_dropped(self) -> tuple[Dropped, ...]:
        """The prompts that were dropped since the last call, for the record of a step; none on ranks other than 0."""
        with self._pool.locked() as book:
            return book.take_dropped()

    def metrics(self) -> dict[str, float]:
        """Metrics of the last batch, and counts of episodes and failed samples since the start; empty but on rank 0."""
        with self._pool.locked() as book:
            return self._metrics | book.counts() if self._team.main else {}

    def standing_still(self) -> AbstractContextManager[object]:
        """A block in which no episode starts, ends or takes a row: what is read inside belongs together. Keep it short."""
        return self._pool.locked()

    def state_dict(self) -> dict[str, Any]:
        """The state (`Stateful`). Called between two steps, and where episodes go on, inside `standing_still`.

        Prompts that have begun and not ended are those that begin anew; what ended stands in `ledger`, which is saved apart.
        """
        with self._pool.locked() as book:
            return {"pool": book.state_dict(), "replay": self.replay.state_dict()} if self._team.main else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first batch."""
        if self._team.main:
            with self._pool.locked() as book:
                book.load_state_dict(state["pool"])
            self.replay.load_state_dict(state["replay"])

    def close(self) -> None:
        """Cancels what is under way; those prompts are pending again. Idempotent."""
        self._pool.close()

    def __enter__(self) -> "Rollout":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
