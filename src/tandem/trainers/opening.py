"""Opens a run: its process, folder and tracker. Trainers and scripts begin here."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tensordict import TensorDict

from tandem.api.samples import Dropped, Group
from tandem.api.weights import WeightVersion
from tandem.config.arithmetic import evaluates_every, is_evaluation_due, total_steps
from tandem.config.experiment import BaseConfig
from tandem.flow.critic import Models
from tandem.flow.parts import Rows
from tandem.flow.plan import RunPlan
from tandem.flow.process import Process, keep_kernels, start_process
from tandem.flow.training import Lasting, TrainingSession
from tandem.lifecycle.summary import check_seen, open_run, save_if_due, tell_limit
from tandem.state.resuming import Examine, refuse_existing
from tandem.state.run_folder import RunFolder
from tandem.tracking.tracker import Tracker
from tandem.trainers.start import fetch_weights

C = TypeVar("C", bound=BaseConfig)


@dataclass(frozen=True)
class Run(Generic[C]):
    """A run that has begun: its folder is open, and its process is set up. The models are in its session."""

    config: C
    plan: RunPlan
    rows: Rows
    steps: int
    """Training steps of the whole run."""

    process: Process
    folder: RunFolder | None
    """The run folder; None on ranks other than 0, like the tracker: one rank writes for all."""

    tracker: Tracker | None
    id: str
    """Names the run to servers that several runs may reach; the same on all ranks."""

    lasting: Lasting | None = None
    """The objects that one session of the run leaves to the next; None: there is only one."""

    def evaluate_if_due(self, session: TrainingSession, step: int) -> dict[str, float]:
        """The figures of the validation rows by metric name; empty if `evaluate.every_steps` asks for none at this step
        (0 is before the first), and where ranks other than 0 know none. Collective."""
        due = is_evaluation_due(evaluates_every(self.config), step, self.steps)
        found: dict[str, float] = session.keep("evaluate") if due else {}
        return found

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group] = (),
        history: Mapping[int, WeightVersion] | None = None,
        batch: TensorDict | None = None,
        dropped: Sequence[Dropped] = (),
    ) -> None:
        """Records a step, on rank 0 (`Tracker.log`). Without any metrics nothing is recorded."""
        if self.tracker is not None and metrics:
            self.tracker.log(step, metrics, groups, history, batch, dropped)

    def save_if_due(self, step: int, models: Models) -> None:
        """Saves a checkpoint where `checkpoint` asks for one at this step: the models, without what resuming needs.
        Collective.

        Raises:
            CheckpointFailed: the disk refuses, unless `checkpoint.on_error` lets training go on.
        """
        save_if_due(self.process.team, self.config, self.folder, step, self.steps, models, models.save_tokenizer)


@contextlib.contextmanager
def start_run(
    config: C,
    rows: Rows,
    plan: RunPlan,
    *,
    recorded: BaseConfig | None = None,
    examine: Examine = refuse_existing,
) -> Iterator[Run[C]]:
    """Sets up this process, downloads what is missing of the plan's models, and opens the run folder. Collective.

    ``recorded``: the configuration that the folder tells of, if it is another one than the run trains by. ``examine``: says
    whether a run that is in the folder goes on (`may_go_on`); none does unless it is given.

    Raises:
        ConfigError: see `start_process`, `fetch_weights`, `open_run` and `keep_kernels`.
    """
    process = start_process(config)
    if process.is_main:
        tell_limit(config, len(rows.train))
        for line in rows.told():
            print(line)
    fetch_weights(plan)
    steps = total_steps(config, len(rows.train))
    with contextlib.ExitStack() as stack:
        folder, tracker = open_run(recorded or config, process, stack, steps=steps, examine=examine, notes=rows.told())
        keep_kernels(config, process, folder)
        name = process.team.share(lambda: "" if folder is None else folder.id)
        with process.team.together():
            check_seen(recorded or config, name)
        yield Run(config, plan, rows, steps, process, folder, tracker, name)
