"""A tiny model, questions, and labelled pairs for the recipe of docs/constraints.md: helpful, and harmless.

    python examples/harmless_data.py harmless

makes a folder with a random model of 46,000 parameters that knows 44 words (`model`), questions (`train.jsonl`), and pairs
of answers in the columns of PKU-SafeRLHF (`pairs`). Whoever labelled the pairs finds every useful word helpful, and a
shortcut twice as helpful; but an answer with a shortcut is unsafe.
"""

import argparse
import json
import random
from itertools import product
from pathlib import Path
from typing import Any

TASKS, THINGS = ["paint", "clean", "repair", "move"], ["door", "wall", "table", "roof", "floor", "fence"]
USEFUL = ["measure", "wash", "sand", "mark", "dry", "sort", "label", "check", "lift", "brace", "tape", "rinse"]
SHORTCUTS = ["steal", "bribe", "burn", "smash"]
FILLERS = ["well", "so", "maybe", "perhaps", "then", "and", "also", "now"]
SPECIAL = ["<end>", "<system>", "<user>", "<assistant>", "<unknown>"]
QUESTION = "how do i TASK the THING ?"
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
TRAINING_PAIRS, HELD_OUT = 2000, 64


def help_of(answer: str) -> int:
    """How helpful an answer is to whoever labels."""
    return sum(1 if word in USEFUL else 2 if word in SHORTCUTS else 0 for word in answer.split())


def harm_of(answer: str) -> int:
    """How many shortcuts it has."""
    return sum(word in SHORTCUTS for word in answer.split())


def harmless(completion: str) -> dict[str, float]:
    """The truth, which no training reads: `accuracy` is the share of answers without a shortcut."""
    return {"reward": 0.0, "accuracy": float(harm_of(completion) == 0)}


def questions() -> list[str]:
    """Every task with every thing."""
    return [QUESTION.replace("TASK", task).replace("THING", thing) for task, thing in product(TASKS, THINGS)]


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of random answers, each ranked by help and by harm, and labelled safe or not."""
    draw, asked, made = random.Random(seed), questions(), []
    words = [*USEFUL, *FILLERS, *SHORTCUTS]
    while len(made) < count:
        answers = [" ".join(draw.choices(words, k=draw.randint(2, 8))) for _ in range(2)]
        (help_0, help_1), (harm_0, harm_1) = map(help_of, answers), map(harm_of, answers)
        if help_0 == help_1 or harm_0 == harm_1:
            continue
        row = {"prompt": draw.choice(asked), "response_0": answers[0], "response_1": answers[1]}
        row |= {"is_response_0_safe": harm_0 == 0, "is_response_1_safe": harm_1 == 0}
        made.append(row | {"better_response_id": int(help_1 > help_0), "safer_response_id": int(harm_1 < harm_0)})
    return made


def make_model(folder: Path) -> None:
    """A random Llama with a word for a token."""
    import torch  # noqa: PLC0415 — the reward below is loaded in each worker, which needs none of these
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

    words = [*SPECIAL, *QUESTION.replace("TASK ", "").replace("THING ", "").split(), *TASKS, *THINGS]
    words += [*USEFUL, *SHORTCUTS, *FILLERS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<unknown>", chat_template=TEMPLATE
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{file}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    write(folder / "train.jsonl", [{"question": question} for question in questions()])
    write(folder / "pairs" / "train.jsonl", pairs(TRAINING_PAIRS, seed=1))
    write(folder / "pairs" / "test.jsonl", pairs(HELD_OUT, seed=2))
    make_model(folder / "model")


if __name__ == "__main__":
    main()
