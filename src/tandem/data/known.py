"""Benchmarks known by name: their source, columns, prompt suffix and reward."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.data import PROCEDURAL, is_procedural
from tandem.config.errors import ConfigError, nearest_names
from tandem.data.programs import APPS, HUMANEVAL, LIVECODEBENCH, MBPP

HASHES = '\nSolve the problem step by step. End with the final number alone on a line after "####".'
BOX = "\nReason step by step and put the final answer into \\boxed{}."


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: the source and columns of its rows, the text added to its questions, and the reward that judges its
    answers."""

    name: str
    title: str
    hub: str
    """Name on the Hugging Face hub; ``name:configuration`` if there are several configurations."""

    hub_split: str
    columns: tuple[str, ...]
    """Columns that every row has."""

    reward: str
    """The reward that judges answers."""

    prompt_suffix: str = ""
    aliases: tuple[str, ...] = ()


KNOWN: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            name="gsm8k",
            title="grade-school word problems (GSM8K)",
            hub="openai/gsm8k:main",
            hub_split="test",
            columns=("question", "answer"),
            prompt_suffix=HASHES,
            reward="math",
            aliases=("gsm-8k",),
        ),
        Benchmark(
            name="math500",
            title="competition problems (MATH-500)",
            hub="HuggingFaceH4/MATH-500",
            hub_split="test",
            columns=("problem", "answer"),
            prompt_suffix=BOX,
            reward="math",
            aliases=("math-500",),
        ),
        Benchmark(
            name="svamp",
            title="one-step word problems with distracting numbers (SVAMP)",
            hub="ChilleD/SVAMP",
            hub_split="test",
            columns=("Body", "Question", "Answer"),
            prompt_suffix=HASHES,
            reward="math",
        ),
        Benchmark(
            name="aime24",
            title="American Invitational Mathematics Examination 2024",
            hub="HuggingFaceH4/aime_2024",
            hub_split="train",
            columns=("problem", "answer"),
            prompt_suffix=BOX,
            reward="math",
            aliases=("aime-24", "aime2024", "aime-2024"),
        ),
        Benchmark(
            name="humaneval",
            title="Python functions with unit tests (HumanEval)",
            hub="openai/openai_humaneval",
            hub_split="test",
            columns=HUMANEVAL.columns,
            reward="code",
            aliases=("human-eval", "openai-humaneval"),
        ),
        Benchmark(
            name="mbpp",
            title="short Python functions with assertions (MBPP)",
            hub="google-research-datasets/mbpp:full",
            hub_split="test",
            columns=MBPP.columns,
            reward="code",
        ),
        Benchmark(
            name="livecodebench",
            title="contest problems with hidden tests (LiveCodeBench)",
            hub="livecodebench/code_generation_lite",
            hub_split="test",
            columns=LIVECODEBENCH.columns,
            reward="code",
            aliases=("lcb", "live-code-bench", "code-generation-lite"),
        ),
        Benchmark(
            name="apps",
            title="contest problems with inputs and outputs (APPS)",
            hub="codeparrot/apps",
            hub_split="test",
            columns=APPS.columns,
            reward="code",
        ),
    )
}


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def benchmark_of(name: str) -> Benchmark | None:
    """Returns the benchmark with this name or alias, or None. Upper and lower case, and `_` and `-`, are the same."""
    plain = _plain(name)
    return next((known for known in KNOWN.values() if plain in (known.name, *known.aliases)), None)


def recognise(path: str, rows: Iterable[Mapping[str, Any]] = ()) -> Benchmark | None:
    """Recognises a benchmark by its hub name, by the last part of the path, or by the parent folder of a file
    (`…/gsm8k/test.jsonl`). Returns None if there is no match.

    ``rows``: programming benchmarks are recognised by their columns too, because only one reward can judge them.
    """
    by_hub = next((known for known in KNOWN.values() if path.partition(":")[0] == known.hub.partition(":")[0]), None)
    place = Path(path)
    by_path = by_hub or benchmark_of(place.stem) or (benchmark_of(place.parent.name) if place.suffix else None)
    first = next(iter(rows), None)
    if by_path is None and first is not None:
        return next((known for known in KNOWN.values() if known.reward == "code" and set(known.columns) <= set(first)), None)
    return by_path


def find_benchmark(name: str) -> Benchmark:
    """Returns the benchmark that a configuration names.

    Raises:
        ConfigError: there is no such benchmark; the message suggests the nearest name.
    """
    benchmark = benchmark_of(name)
    if benchmark is None:
        raise ConfigError(f"no benchmark is called {name!r}; {nearest_names(name, KNOWN)}, and none")
    return benchmark


def locate(path: str, root: str | None) -> tuple[str, bool]:
    """Finds the rows of a data set. Returns (place, True if the place is the hub).

    The place is ``path`` if it exists or names a generated data set. For a known benchmark it is its folder below ``root``,
    or its hub name if ``root`` is None. Otherwise it is ``path``, and a path with a slash is a hub name.

    Raises:
        ConfigError: ``path`` is a single word that is neither a file, a folder nor a known name (the message suggests the
            nearest), or ``root`` has no folder of the benchmark.
    """
    if Path(path).expanduser().exists() or is_procedural(path):
        return path, False
    known = benchmark_of(path)
    if known is not None:
        if root is None:
            return known.hub, True
        folders = {_plain(f.name): f for f in Path(root).expanduser().iterdir()} if Path(root).expanduser().is_dir() else {}
        for name in (known.name, *known.aliases):
            if name in folders:
                return str(folders[name]), False
        raise ConfigError(f"data_root={root} has no folder {known.name}; there are: {', '.join(sorted(folders)) or 'none'}")
    if "/" not in path and not Path(path).suffix:
        raise ConfigError(
            f"no data set is called {path!r}, and no file or folder in {Path.cwd()}; "
            f"{nearest_names(path, [*KNOWN, *PROCEDURAL])}, reasoning_gym:NAME, folders, files, and hub names (owner/name)"
        )
    return path, "/" in path
