"""Writes docs/life_of_a_batch.md: from prompt to gradient, the files in order, with their line counts.

python scripts/life_of_a_batch.py > docs/life_of_a_batch.md
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

WALK = [
    ("src/tandem/data/loader.py", "A row of the data set comes, with its epoch and its place in it."),
    (
        "src/tandem/rollout/executor.py",
        "The gate (`gate.py`) lets an episode start, the ledger (`ledger.py`) writes down which; the episode runs on "
        "the executor's event loop, with retries and a deadline, and its group waits to be consumed, oldest first.",
    ),
    (
        "src/tandem/rollout/workflows.py",
        "The workflow renders the chat (`chat.py`), asks the engine for tokens, and the reward for its judgement: a sample; "
        "`Repeated` makes a group of them.",
    ),
    (
        "src/tandem/engines/inference/core.py",
        "One scheduling round: admit requests, compute a piece of their prompts, decode one token of every running "
        "sequence, sample, stamp each token with the version that made it.",
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
        "src/tandem/engines/train/fsdp.py",
        "Micro-batches by token budget, forward, weighted sum of losses, backward, clipping, one optimizer step.",
    ),
    (
        "src/tandem/weights/publisher.py",
        "The new weights are streamed with a digest each, verified by the engine, and become the next version between two "
        "decode steps.",
    ),
]

HEADER = """# The life of a batch

<!-- Made by `python scripts/life_of_a_batch.py`; edit that file instead. -->

From prompt to gradient, and back to the engine: the files in the order in which a batch meets them. The loop that calls
them is `step` in `src/tandem/trainers/rl.py`; the words are those of [concepts.md](concepts.md).

| | file | lines | what happens |
|---|---|---|---|"""


def page() -> str:
    """The page as it should be."""
    rows, total = [], 0
    for number, (name, what) in enumerate(WALK, 1):
        lines = len((ROOT / name).read_text().splitlines())
        total += lines
        rows.append(f"| {number} | [`{name.removeprefix('src/tandem/')}`](../{name}) | {lines} | {what} |")
    return "\n".join([HEADER, *rows, "", f"{len(WALK)} files, {total} lines.", ""])


if __name__ == "__main__":
    print(page(), end="")
