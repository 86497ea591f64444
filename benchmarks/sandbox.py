"""Measures how many short Python programs a sandbox runs in a second, by back end, and what an interpreter for each costs.

    python benchmarks/sandbox.py                                 # each back end that works here
    python benchmarks/sandbox.py --programs 20 --rounds 1        # only to see that it starts

Warm: programs of one line that print a number, each in a session of its own, forked from a fork server that has imported
the common modules already; as many at once as there are workers. Cold: the same programs, each in a Python that is started
inside. CPU time is that of all processes of the workers and of this one, so it says what an idle machine could do when this
one is not idle. Prints one JSON object.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import time
from pathlib import Path

from tandem.api.sandbox import Program, Sandbox
from tandem.config.errors import ConfigError
from tandem.sandbox.choose import choose_sandbox
from tandem.sandbox.guest.processes import descendants_of
from tandem.sandbox.jail import interpreter
from tandem.sandbox.pool import SandboxPool


def cpu_seconds(sandbox: SandboxPool) -> float:
    """CPU time of this process and of all workers, with what their ended children used."""
    ticks = 0
    for pid in {pid for worker in sandbox.pids for pid in {worker} | descendants_of(worker)}:
        with contextlib.suppress(OSError):  # a session that has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


async def run_all(sandbox: Sandbox, programs: list[Program]) -> None:
    """Runs them together."""
    outcomes = await asyncio.gather(*[sandbox.run(program) for program in programs])
    assert all(outcome.status == "ok" for outcome in outcomes), {outcome.status for outcome in outcomes}


def measure(sandbox: SandboxPool, programs: list[Program], rounds: int) -> dict[str, float]:
    """Programs a second and milliseconds of CPU time a program: medians of rounds."""
    asyncio.run(run_all(sandbox, programs[:4]))  # starts the workers
    rates, costs = [], []
    for _ in range(rounds):
        began, used = time.perf_counter(), cpu_seconds(sandbox)
        asyncio.run(run_all(sandbox, programs))
        rates.append(len(programs) / (time.perf_counter() - began))
        costs.append(1000 * (cpu_seconds(sandbox) - used) / len(programs))
    return {"programs_per_s": round(statistics.median(rates), 1), "cpu_ms_each": round(statistics.median(costs), 2)}


def main() -> None:
    """Measures each back end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    warm = [Program(source=f"print({i} ** 2)") for i in range(arguments.programs)]
    cold = [Program(argv=(str(interpreter()), "-S", "-c", f"print({i} ** 2)")) for i in range(arguments.programs // 4 + 1)]
    results: dict[str, object] = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    for name in ("bubblewrap", "landlock", "none"):
        try:
            sandbox = choose_sandbox(name)
        except ConfigError as error:
            results[name] = str(error)
            continue
        assert isinstance(sandbox, SandboxPool)
        rounds = arguments.rounds
        results[name] = {"warm": measure(sandbox, warm, rounds), "cold": measure(sandbox, cold, rounds)}
        sandbox.close()
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
