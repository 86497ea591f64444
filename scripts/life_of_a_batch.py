"""Writes docs/life_of_a_batch.md: the files from prompt to gradient, and from the command to the loop, with their lengths.

python scripts/life_of_a_batch.py > docs/life_of_a_batch.md
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

WALK = [
    (
        "src/tandem/rollout/executor.py",
        "Rows come from the loader (`data/loader.py`) as the gate (`gate.py`) lets episodes start, and the ledger "
        "(`ledger.py`) writes down which. They run in the pool (`pool.py`), with retries and a deadline; finished groups "
        "are consumed oldest first (`collector.py`).",
    ),
    (
        "src/tandem/rollout/workflows.py",
        "The workflow renders the chat (`chat.py`), asks the engine for tokens, and the reward for its judgement: a sample; "
        "`Repeated` makes a group of them.",
    ),
    (
        "src/tandem/engines/inference/core.py",
        "One scheduling round: admit requests (`scheduler.py`), compute a piece of their prompts, decode one token of every "
        "running sequence (`passes.py`), sample (`slots.py`), stamp each token with the version that made it.",
    ),
    (
        "src/tandem/rollout/collate.py",
        "Groups become one packed batch: `[T]` tokens end to end, `[N]` sequences, no padding.",
    ),
    (
        "src/tandem/roles/actor.py",
        "Proximal log-probabilities where they are needed, advantages (next line), what is chosen among the tokens of the "
        "whole batch (`tokens.py`), then mini-batches with the weight of each token in the global batch.",
    ),
    ("src/tandem/roles/credit.py", "Rewards are shaped and become the advantage of each token."),
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
    ("src/tandem/cli/train.py", "Names the kind of configuration and the loop."),
    ("src/tandem/cli/running.py", "Loads the configuration, and starts one process for each rank."),
    (
        "src/tandem/config/load.py",
        "Defaults, preset, file and command line become one configuration (`tree.py`), which is checked (`check.py`).",
    ),
    ("src/tandem/trainers/rl.py", "Makes the plan of the run, prepares, opens, and loops."),
    (
        "src/tandem/flow/plan.py",
        "Decides which models there are and which stages run; resolves the names of the algorithm (`roles/parts.py`).",
    ),
    ("src/tandem/trainers/start.py", "Everything that is refused before there is a run folder."),
    (
        "src/tandem/flow/services.py",
        "Makes rewards, workflows, and the services that they ask for by argument name (`api/services.py`), once.",
    ),
    ("src/tandem/flow/parts.py", "Reads the rows; makes the loader and the executor."),
    ("src/tandem/flow/process.py", "Device, threads and process group."),
    ("src/tandem/trainers/opening.py", "Opens the run: its process, folder and tracker."),
    ("src/tandem/lifecycle/summary.py", "Opens the run folder, and says what a run came to."),
    ("src/tandem/state/resuming.py", "Decides whether a run that is in the folder goes on."),
    ("src/tandem/lifecycle/oversight.py", "Watches the run for a stand-still, and for the wish to stop."),
    ("src/tandem/flow/session.py", "Makes the objects of the run in order, from the plan."),
    ("src/tandem/flow/residents.py", "Opens the models of the plan."),
    ("src/tandem/flow/delivery.py", "How weights reach the engine, and how that is proved."),
    ("src/tandem/lifecycle/weight_record.py", "The record of the weights of each step, in deterministic runs."),
    ("src/tandem/lifecycle/saving.py", "When checkpoints are written."),
]
"""Every file that is handed the whole configuration on the way from `tandem train` to the first step. A test compares."""

HEADER = """# The life of a batch

<!-- Made by `python scripts/life_of_a_batch.py`; edit that file instead. -->

From prompt to gradient: the files in the order in which a batch meets them. The loop that calls them is `step` in
[`trainers/rl.py`](../src/tandem/trainers/rl.py); the words are those of [concepts.md](concepts.md). A file in brackets is
what a line of the walk leans on: open it for the detail, not for the way.
"""

START = """## From the command to the loop

Before that, `tandem train` turns a configuration into the objects of a run, each made once. These are the {count} files
that are handed the whole configuration, in the order in which it meets them; all others take what they need of it.
"""

COLUMNS = """| | file | lines | what happens |
|---|---|---|---|"""


def lines(name: str) -> int:
    """Of one file."""
    return len((ROOT / name).read_text().splitlines())


def rows(files: list[tuple[str, str]], first: int = 1) -> list[str]:
    """One row for each file, numbered."""
    return [
        f"| {number} | [`{name.removeprefix('src/tandem/')}`](../{name}) | {lines(name)} | {what} |"
        for number, (name, what) in enumerate(files, first)
    ]


def page() -> str:
    """The page as it should be."""
    total = f"{len(WALK)} files, {sum(lines(name) for name, _ in WALK)} lines. And back to the engine:"
    back = rows(BACK, len(WALK) + 1)
    walk = [HEADER, COLUMNS, *rows(WALK), "", total, "", COLUMNS, *back, ""]
    return "\n".join([*walk, START.format(count=len(CONFIGURATION)), COLUMNS, *rows(CONFIGURATION), ""])


if __name__ == "__main__":
    print(page(), end="")
