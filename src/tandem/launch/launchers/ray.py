"""Starts each rank in a Ray actor, in one placement group, on an existing Ray cluster or a new one on this machine."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.config.errors import ConfigError, TandemError, kind_and_text
from tandem.launch.launchers import Launcher, LaunchJob, new_attempt, outcome, start_group
from tandem.launch.place import Place, free_port

READY_S = 600.0
"""Longest time until the cluster provides the devices, in seconds."""

ANSWER_S = 60.0
END_S = 40.0
POLL_S = 0.5
OWN = "local"
"""Ray's address for a new cluster on this machine."""


def join_cluster(ray: Any, address: str, **settings: Any) -> None:
    """Connects this process to the cluster at ``address``. Raises `TandemError` if no Ray answers there."""
    try:
        ray.init(address=address, **settings)
    except (ConnectionError, ValueError) as error:
        raise TandemError(
            f"no Ray answers at {address} ({kind_and_text(error)}). Correct --address or RAY_ADDRESS, or leave both out for "
            "a Ray that ends with the run; if the cluster requires a token, set RAY_AUTH_MODE=token"
        ) from error


class RankGroup:
    """A Ray actor that runs a group of one rank. The rank ends when the actor ends for any reason."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def machine(self) -> tuple[str, str, int]:
        """Returns (the node's id in Ray, its address, a free port)."""
        import ray  # noqa: PLC0415 an extra

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port()

    def start(self, job: LaunchJob, place: Place, attempt: Path, joins: bool) -> None:
        """Starts the rank. ``joins``: with `runner=ray`, the rank uses this cluster."""
        environment = place.variables()
        if joins:
            environment["RAY_ADDRESS"] = _ray().get_runtime_context().gcs_address
        self._process = start_group(job.command(sys.executable), attempt, place.first, environment)

    def poll(self) -> int | None:
        return self._process.poll() if self._process else None

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)


class RayJob(Launcher):
    """Starts one run on Ray, with an actor for each rank."""

    restarts = True

    def __init__(self, jobs: Sequence[LaunchJob], options: argparse.Namespace):
        super().__init__(jobs, options)
        (self._job,) = jobs
        self._attempt: Path | None = None
        self._group: Any = None
        self._actors: list[Any] = []
        self._polled_at, self._ending = 0.0, False
        if options.cpus_per_rank < 1 or options.gpus_per_rank < 0:
            raise ConfigError("--cpus-per-rank must be at least 1, and --gpus-per-rank at least 0")

    @staticmethod
    def add_arguments(parser: Any) -> None:
        parser.add_argument("--address", metavar="HOST:PORT", help="the cluster (default: RAY_ADDRESS, else a new one here)")
        parser.add_argument("--cpus-per-rank", type=int, default=1, metavar="N", help="cores that Ray counts for a rank")
        parser.add_argument("--gpus-per-rank", type=int, default=0, metavar="N", help="GPUs that Ray counts for a rank")
        parser.add_argument(
            "--strategy", default="PACK", choices=("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"), help="default: PACK"
        )

    def _bundle(self) -> dict[str, float]:
        gpus = {"GPU": float(self.options.gpus_per_rank)} if self.options.gpus_per_rank else {}
        return {"CPU": float(self.options.cpus_per_rank), **gpus}

    @property
    def _address(self) -> str:
        return self.options.address or os.environ.get("RAY_ADDRESS") or OWN

    def describe(self) -> str:
        where = "a new Ray cluster on this machine" if self._address == OWN else self._address
        return (
            f"{' '.join(self._job.command())}\n{self._job.ranks} actor(s), one a rank, each with {self._bundle()} in one "
            f"placement group ({self.options.strategy}), on {where}\nlogs: {self._job.folder}"
        )

    def start(self) -> None:
        ray = _ray()
        self.close()
        paths = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
        if not ray.is_initialized():
            runtime = {"env_vars": paths | {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
            join_cluster(ray, self._address, runtime_env=runtime, log_to_driver=False, include_dashboard=False)
        bundles = [self._bundle()] * self._job.ranks
        self._group = ray.util.placement_group(bundles, strategy=self.options.strategy)
        if not self._group.wait(READY_S):
            raise TandemError(
                f"Ray has not provided {self._job.ranks} × {self._bundle()} within {READY_S:.0f} s; the cluster has "
                f"{ray.cluster_resources()}"
            )
        actor_class = ray.remote(RankGroup)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        bundle = self._bundle()
        self._actors = [
            actor_class.options(
                num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy(self._group, index)
            ).remote()
            for index in range(self._job.ranks)
        ]
        machines = ray.get([actor.machine.remote() for actor in self._actors], timeout=READY_S)
        order = sorted(range(len(machines)), key=lambda index: [m[0] for m in machines].index(machines[index][0]))
        self._actors, machines = [self._actors[i] for i in order], [machines[i] for i in order]
        nodes = [node for node, _, _ in machines]
        _, address, port = machines[0]
        self._attempt = new_attempt(self._job)
        joins = self._address != OWN  # a new cluster may have no free cores
        ray.get(
            [
                actor.start.remote(
                    self._job,
                    Place(rank, 1, len(nodes), nodes[:rank].count(node), nodes.count(node), address, port),
                    self._attempt,
                    joins,
                )
                for rank, (actor, node) in enumerate(zip(self._actors, nodes, strict=True))
            ],
            timeout=ANSWER_S,
        )

    def poll(self) -> int | None:
        if time.monotonic() - self._polled_at < POLL_S:
            return None
        self._polled_at = time.monotonic()
        codes: list[int | None] = []
        for actor in self._actors:
            try:
                codes.append(_ray().get(actor.poll.remote(), timeout=ANSWER_S))
            except Exception as error:  # boundary: the actor or its node has died
                codes.append(1)
                if not self._ending:
                    print(f"error: a rank's actor does not answer: {kind_and_text(error)}", file=sys.stderr)
        if any(codes) and not self._ending:
            self._ending = True  # only once, because a second signal interrupts a rank that is writing
            self.signal(signal.SIGTERM)
        ended = all(code is not None for code in codes)
        return outcome(self._attempt, max(abs(code or 0) for code in codes)) if ended else None

    def signal(self, number: int) -> None:
        for actor in self._actors:
            actor.signal.remote(number)

    def attempt(self, job: LaunchJob) -> Path | None:
        return self._attempt

    def close(self) -> None:
        if self._actors:
            self.signal(signal.SIGTERM)
            deadline = time.monotonic() + END_S
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL_S)
        for actor in self._actors:
            _ray().kill(actor)
        self._actors = []
        if self._group is not None:
            _ray().util.remove_placement_group(self._group)
            self._group = None
        self._ending = False


def _ray() -> Any:
    try:
        import ray  # noqa: PLC0415 an extra
        import ray.util.scheduling_strategies  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"tandem launch ray needs Ray, which is not installed here ({error}): pip install ray") from error
    return ray


LAUNCHER = RayJob
