"""Writes docs/life_of_a_batch.md: the files from prompt to gradient, and from the command to the loop, with their lengths.

python scripts/life_of_a_batch.py > docs/life_of_a_batch.md
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

WALK = [
    (
        "src/tandem/rollout/executor.py",
        "Rows of the loader run as episodes in the pool (`episode_pool.py`), as the staleness gate lets them start, with "
        "retries and a deadline; the pool's book counts them. Finished groups are taken oldest first, after all ranks have "
        "scored them where a reward needs a model, and become one packed batch: `[T]` tokens end to end, `[N]` sequences. "
        "Tokens older than the [staleness bound](concepts.md#the-staleness-bound) are marked, so that they get no weight.",
    ),
    (
        "src/tandem/rollout/workflows.py",
        "The workflow renders the chat, asks the engine for tokens, and the reward for its judgement: a sample; `Repeated` "
        "makes a group of them.",
    ),
    (
        "src/tandem/engines/inference/rounds.py",
        "One scheduling round: admit requests (`scheduler.py`), compute a piece of their prompts, decode one token of every "
        "running sequence (`passes.py`), sample and stamp each token with the version that made it (`sequences.py`).",
    ),
    (
        "src/tandem/roles/actor.py",
        "Proximal log-probabilities where they are needed, advantages (next line), then mini-batches with the weight of "
        "each token in the global batch.",
    ),
    (
        "src/tandem/roles/credit.py",
        "Rewards are shaped and become the advantage of each token. Several trajectories may be one sample.",
    ),
    ("src/tandem/roles/objective.py", "The loss of each token: policy loss, behaviour correction, KL, entropy."),
    (
        "src/tandem/engines/train/engine.py",
        "Micro-batches by token budget (`micro_batches.py`), forward, weighted sum of losses, backward, and one clipped "
        "step (`optimizer.py`).",
    ),
]

BACK = [
    (
        "src/tandem/weights/publisher.py",
        "The new weights are streamed with a digest each, verified by the engine, and become the next version between two "
        "decode steps.",
    ),
]

CONFIGURATION = [
    ("src/tandem/cli/main.py", "Finds the command, and turns errors into messages."),
    (
        "src/tandem/cli/running.py",
        "Loads the configuration of the command, starts one process for each rank, and calls the loop.",
    ),
    (
        "src/tandem/config/load.py",
        "Defaults, preset, file and command line become one configuration, which is checked (`check.py`).",
    ),
    (
        "src/tandem/state/resuming.py",
        "Pins a run's name in the place of a model to the checkpoint that it stands for; later decides whether a run "
        "that is in the folder goes on.",
    ),
    (
        "src/tandem/trainers/loop.py",
        "Makes the plan of the run, prepares, opens, and loops, for every kind of training; says what a run came to.",
    ),
    (
        "src/tandem/flow/plan.py",
        "Decides which models there are (`planned_models.py`), and so who a step can call; the stages are the trace of the "
        "step (`stages.py`).",
    ),
    (
        "src/tandem/trainers/start.py",
        "Everything that is refused before there is a run folder; then opens the run: its process, folder and tracker. On "
        "GPUs `planning/fit.py` asks if they can hold it.",
    ),
    (
        "src/tandem/flow/services.py",
        "Makes rewards, workflows, and the services that they ask for by argument name (`api/services.py`), once.",
    ),
    ("src/tandem/flow/process.py", "Device, threads and process group."),
    (
        "src/tandem/flow/opening.py",
        "Reads the rows, and says what context they need; makes the objects of the run in order, from the plan.",
    ),
    (
        "src/tandem/flow/residents.py",
        "Says if the models of the plan can be had here, opens them, and makes the roles on those of this process; with how "
        "weights reach the engine, and how that is proved.",
    ),
    ("src/tandem/flow/sleep_plan.py", "What each model keeps, by part, and which parts sleep under `memory_limit_gib`."),
]
"""Every file that is handed the whole configuration on the way from `tandem train` to the first step. A test compares."""

ROOMS = ("rollout", "roles", "engines")
"""Rooms of the walk. Contracts (`api`), settings, the mathematics that is chosen by name, and models are read by name."""

MADE = ("src/tandem/engines/train/optimizer.py",)
"""Counted with the imports of the walk: `held_model.py` makes it, and `engine.py` calls it for every mini-batch."""

BESIDE = {
    "at the start": (
        "engines/train/held_model",
        "engines/train/spread",
        "roles/components",
        "roles/parts",
    ),
    "for an option": (
        "engines/inference/tower",
        "engines/inference/watched",
        "roles/critic",
        "rollout/remote_episodes",
        "rollout/replay",
    ),
    "to check, or when something failed": (
        "engines/inference/engine_calls",
        "rollout/sample_checks",
    ),
    "for metrics": ("roles/batch_metrics", "rollout/batch_statistics"),
    "on the way back": ("engines/inference/decoder",),
}
"""The files that those of the walk import and a batch does not pass through, by when they are needed."""

HEADER = """# The life of a batch

<!-- Made by `python scripts/life_of_a_batch.py`; edit that file instead. -->

From prompt to gradient: the files in the order in which a batch meets them. What calls them is `learn_from_rewards` in
[`flow/step.py`](../src/tandem/flow/step.py), twenty lines of verbs; the words are those of [concepts.md](concepts.md). A
file in brackets is one step aside: a file of the walk imports it and calls it for every batch. Open it for the detail, not
for the way.
"""

START = """## From the command to the loop

Before that, `tandem train` turns a configuration into the objects of a run, each made once. These are the {count} files
that are handed the whole configuration, in the order in which it meets them; all others take what they need of it.
"""

COLUMNS = """| | file | lines | what happens |
|---|---|---|---|"""


def lines(name: str) -> int:
    """Number of lines of a file."""
    return len((ROOT / name).read_text().splitlines())


def imported(name: str) -> set[str]:
    """Files of the walk's rooms that a file imports from."""
    tree = ast.parse((ROOT / name).read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    files = {f"src/{module.replace('.', '/')}.py" for module in modules if module.startswith("tandem.")}
    return {file for file in files if file.split("/")[2] in ROOMS}


def brackets() -> list[str]:
    """Files one step aside: all that the walk imports in its rooms, and `MADE`, without the walk and what is `BESIDE` it."""
    beside = {f"src/tandem/{name}.py" for names in BESIDE.values() for name in names}
    return sorted(set(MADE).union(*(imported(name) for name, _ in WALK)) - {name for name, _ in WALK} - beside)


def rows(files: list[tuple[str, str]], first: int = 1) -> list[str]:
    """One row for each file, numbered."""
    return [
        f"| {number} | [`{name.removeprefix('src/tandem/')}`](../{name}) | {lines(name)} | {what} |"
        for number, (name, what) in enumerate(files, first)
    ]


def page() -> str:
    """The page as it should be."""
    walk = [name for name, _ in WALK]
    total = (
        f"{len(walk)} files, {sum(map(lines, walk))} lines; with those in brackets {len(walk + brackets())} files, "
        f"{sum(map(lines, walk + brackets()))} lines. And back to the engine:"
    )
    back = rows(BACK, len(WALK) + 1)
    walk = [HEADER, COLUMNS, *rows(WALK), "", total, "", COLUMNS, *back, ""]
    return "\n".join([*walk, START.format(count=len(CONFIGURATION)), COLUMNS, *rows(CONFIGURATION), ""])


if __name__ == "__main__":
    print(page(), end="")
