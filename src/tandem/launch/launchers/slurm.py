"""Submits a batch job of Slurm, or an array of jobs. Each rank is a task; servers run beside rank 0."""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, TemplateError

from tandem.config.errors import ConfigError, TandemError
from tandem.launch.launchers import Launcher, LaunchJob, needed, outcome

SCRIPT = "slurm.sh"
TEMPLATE = "slurm.sh.jinja"
POLL_S = 2.0
ASK_S = 60.0
CLOSE_S = 90.0
"""Seconds that a run may need to end, in addition to `recover.grace_s`."""

LEAST_S = 120
OPTIONS = ("account", "partition", "time")


class SlurmJob(Launcher):
    """Submits runs to Slurm as one job or an array, and follows it."""

    detaches = True

    def __init__(self, jobs: Sequence[LaunchJob], options: argparse.Namespace):
        super().__init__(jobs, options)
        self._id, self._before = "", {path for job in jobs for path in job.folder.glob("slurm-*-*")}
        self._asked_at, self._state = 0.0, "PENDING"
        nodes, ranks = options.nodes, {job.ranks for job in jobs}
        if len(ranks) > 1:
            raise ConfigError(f"jobs of an array must have equally many ranks (actor.backend), got {sorted(ranks)}")
        if nodes < 1 or jobs[0].ranks % nodes:
            raise ConfigError(
                f"--nodes {nodes}: {jobs[0].ranks} ranks (actor.backend) cannot be spread evenly; use a divisor of the ranks"
            )
        if len({job.folder for job in jobs}) < len(jobs):
            raise ConfigError("two jobs of the array are the same run: give each --array its own trial_name=…")
        if len({(job.max_restarts, job.grace_s) for job in jobs}) > 1:
            raise ConfigError("jobs of an array must have the same recover.max_restarts and recover.grace_s")
        if spaced := next((line for line in options.srun if " " in line.partition("=")[0]), None):
            raise ConfigError(f"--srun {spaced!r}: write NAME=VALUE, such as mem=4G")
        for line in (*options.sbatch, *options.srun):
            if not re.fullmatch(r"(-[a-zA-Z]|[a-z][a-z0-9-]*)([= ][^\n]*)?", line.removeprefix("--")):
                raise ConfigError(f"{line!r} is not an option of sbatch or srun, such as gpus-per-node=8")

    @staticmethod
    def add_arguments(parser: Any) -> None:
        parser.add_argument(
            "--nodes", type=int, default=1, metavar="N", help="number of nodes; all get equally many ranks (default: 1)"
        )
        parser.add_argument("--account", metavar="A", help="account that is charged")
        parser.add_argument("--partition", metavar="P", help="queue")
        parser.add_argument("--time", metavar="HH:MM:SS", help="time limit; the run saves before it, and is requeued")
        parser.add_argument(
            "--sbatch", action="append", default=[], metavar="NAME=VALUE", help="another #SBATCH line; may be repeated"
        )
        parser.add_argument(
            "--srun", action="append", default=[], metavar="NAME=VALUE", help="another option of srun: container-image=…"
        )
        parser.add_argument(
            "--array",
            action="append",
            default=[],
            metavar="'[CONFIG] KEY=VALUE …'",
            help="one run of an array of runs; may be repeated",
        )
        parser.add_argument("--template", type=Path, metavar="FILE", help="your own template of the batch script")
        parser.add_argument("--detach", action="store_true", help="submit the job without following it")

    def describe(self) -> str:
        template = self.options.template
        try:
            text = (template or files(__package__).joinpath(TEMPLATE)).read_text(encoding="utf-8")
            environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
            return environment.from_string(text).render(self._values())
        except (OSError, UnicodeDecodeError, TemplateError) as error:
            raise ConfigError(f"--template {template}: {error}") from error

    def _values(self) -> dict[str, Any]:
        """Returns the variables of the template."""
        job, options = self.jobs[0], self.options
        before_s = max(LEAST_S, round(job.grace_s + CLOSE_S))
        array = [f"--array=0-{len(self.jobs) - 1}"] if len(self.jobs) > 1 else []
        log = job.folder / "slurm-%j.log"
        directives = [f"--job-name={job.name if not array else 'tandem'}", f"--nodes={options.nodes}"]
        directives += [f"--ntasks={job.ranks}", f"--ntasks-per-node={job.ranks // options.nodes}", *array]
        directives += [f"--{name}={value}" for name in OPTIONS if (value := getattr(options, name))]
        directives += [f"--signal=B:TERM@{before_s}", "--requeue", "--open-mode=append"]
        directives += [f"--chdir={shlex.quote(os.getcwd())}", f"--output={shlex.quote(str(log))}"]
        command = LaunchJob("", Path(), (), 0, prefix=job.prefix).command()
        return {
            "directives": [*directives, *(f"{_dashes(line)}" for line in options.sbatch)],
            "srun": "".join(f" {shlex.quote(_dashes(line))}" for line in options.srun),
            "runs": [{"folder": shlex.quote(str(run.folder)), "words": shlex.join(run.words)} for run in self.jobs],
            "python": shlex.quote(sys.executable),
            "command": shlex.join(command),
            "max_restarts": job.max_restarts,
        }

    def start(self) -> None:
        sbatch, text = (
            needed("sbatch", "submit on a machine with Slurm, or print the script with --dry-run"),
            self.describe(),
        )
        for job in self.jobs:
            job.folder.mkdir(parents=True, exist_ok=True)
        script = self.jobs[0].folder / SCRIPT
        with open(os.open(script, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        done = _ask([sbatch, "--parsable", str(script)])
        if done.returncode:
            raise TandemError(f"sbatch refused {script}: {done.stderr.strip()}")
        self._id = done.stdout.strip().partition(";")[0]
        print(f"Slurm job {self._id}: {script}. To end it: scancel {self._id}", file=sys.stderr)

    def poll(self) -> int | None:
        if self.options.detach:
            return 0
        if time.monotonic() - self._asked_at < POLL_S:
            return None
        self._asked_at = time.monotonic()
        done = _ask(["squeue", "--noheader", f"--jobs={self._id}", "--format=%T"])
        if done.returncode and "Invalid job id" not in done.stderr:
            return None  # the controller does not answer now; the job goes on without it
        states = " ".join(sorted(set(done.stdout.split())))
        if states and states != self._state:
            print(f"Slurm job {self._id}: {states}", file=sys.stderr)
        self._state = states
        return None if states else self._outcome()

    def _outcome(self) -> int:
        """Returns the worst exit status of the jobs. A job without a status, such as a cancelled job, counts as 1."""
        codes = []
        for job in self.jobs:
            folder = self.attempt(job)
            ended = folder is not None and (folder / "code").is_file()
            codes.append(outcome(folder, int((folder / "code").read_text()) if folder and ended else 1))
        return max(codes, key=lambda code: (code not in (0, 130), code))

    def signal(self, number: int) -> None:
        _ask(["scancel", f"--signal={number}", self._id])

    def attempt(self, job: LaunchJob) -> Path | None:
        folders = [path for path in job.folder.glob("slurm-*-*") if path.is_dir() and path not in self._before]
        return max(folders, key=lambda path: [int(number) for number in path.name.split("-")[1:]], default=None)


def _dashes(option: str) -> str:
    return option if option.startswith("-") else f"--{option}"


def _ask(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command of Slurm; only this user can read files that it writes. Raises `TandemError` if it does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False, umask=0o077)
    except subprocess.TimeoutExpired as error:
        raise TandemError(f"{command[0]} did not answer within {ASK_S:.0f} s") from error


LAUNCHER = SlurmJob
