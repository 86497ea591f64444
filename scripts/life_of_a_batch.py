"""Writes docs/life_of_a_batch.md: from prompt to gradient, the files in order, with their line counts.

python scripts/life_of_a_batch.py > docs/life_of_a_batch.md
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

WALK = [
    (
        "src/tandem/rollout/executor.py",
        "Rows come from the loader (`data/loader.py`). Their episodes (`episodes.py`) run in the pool (`pool.py`) as the "
        "gate (`gate.py`) lets them start, with retries and a deadline, and the ledger (`ledger.py`) writes down which. "
        "Finished groups are taken oldest first; rewards that need a model come before the filter, from all ranks.",
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

HEADER = """# The life of a batch

<!-- Made by `python scripts/life_of_a_batch.py`; edit that file instead. -->

From prompt to gradient: the files in the order in which a batch meets them. The loop that calls them is `step` in
[`trainers/rl.py`](../src/tandem/trainers/rl.py); the words are those of [concepts.md](concepts.md). A file in brackets is
what a line of the walk leans on: open it for the detail, not for the way.
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
    return "\n".join([HEADER, COLUMNS, *rows(WALK), "", total, "", COLUMNS, *back, ""])


if __name__ == "__main__":
    print(page(), end="")
