"""Makes the data of the search recipe (docs/recipes/search_agent.md): sentences of Python's documentation that miss a word.

    python examples/search_data.py search_data

The folder gets topics/, the texts of the module `pydoc_data.topics`, which the tool searches; rl.jsonl and test.jsonl, with
questions and answers; and sft.jsonl: chats that show a search. No sentence is in two of these.
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tandem import SearchBox, plain_chat, tool_schema

SHOWN, TESTED = 64, 100
SEARCH = {"results": 1, "passage_characters": 250}  # as in the YAML files of the recipe
SENTENCE = re.compile(r"[A-Z][A-Za-z ,'-]+\.")


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a topic, each in one line and without marks of emphasis; what may be code stays as it is."""
    for part in re.split(r"\n\s*\n", text):
        prose = not part.startswith("    ") and "::=" not in part and ">>>" not in part
        yield re.sub(r"\*(\w[^*]*)\*", r"\1", " ".join(part.split())) if prose else part


def question(sentence: str, seen: Counter[str]) -> dict[str, str] | None:
    """Asks for the rarest word of a sentence that has at least five words before it, which are what to search for."""
    words = sentence[:-1].split()
    gaps = [i for i, word in enumerate(words) if i >= 5 and word.islower() and word.isalpha() and len(word) >= 5]
    if not 9 <= len(words) <= 18 or not gaps:
        return None
    gap = min(gaps, key=lambda i: (seen[words[i]], i))
    if words.count(words[gap]) > 1:
        return None
    before = " ".join(words[:gap])
    asked = " ".join([*words[:gap], "___", *words[gap + 1 :]])
    return {"question": f"Fill the gap: {asked}.", "answer": sentence, "word": words[gap], "query": before}


def shown(row: dict[str, str], tool: SearchBox) -> dict[str, object]:
    """A chat that searches for the words before the gap, and copies the sentence that is found."""
    call = {"name": "search", "arguments": {"query": row["query"]}}
    chat = [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "search", "content": tool.search(row["query"])},
        {"role": "assistant", "content": row["answer"]},
    ]
    return {"messages": plain_chat(chat, [tool_schema(tool.search), tool_schema(tool.read)])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    out = parser.parse_args().out
    (out / "topics").mkdir(parents=True, exist_ok=True)
    texts = {name: list(paragraphs(text)) for name, text in sorted(topics.items())}
    for name, parts in texts.items():
        (out / "topics" / f"{name}.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")

    seen = Counter(word for parts in texts.values() for part in parts for word in re.findall(r"\w+", part.lower()))
    sentences = [s for parts in texts.values() for part in parts for s in re.split(r"(?<=\.) ", part)]
    asked = (question(s, seen) for s in dict.fromkeys(sentences) if SENTENCE.fullmatch(s))
    tool = SearchBox(str(out / "topics"), **SEARCH)
    rows = [row for row in asked if row and row["answer"] in tool.search(row["query"])]  # the others have no answer
    draw = random.Random(0)
    draw.shuffle(rows)
    written = {
        "sft": [shown(row, tool) for row in rows[:SHOWN]],
        "test": rows[SHOWN : SHOWN + TESTED],
        "rl": rows[SHOWN + TESTED :],
    }
    tool.close()
    for name, part in written.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{out / name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
