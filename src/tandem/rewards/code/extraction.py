"""Finding the program in an answer. Linear in the text, whatever it holds."""

import re

FENCE = re.compile(r"[ ]{0,3}(`{3,}|~{3,})([^`\n]*)$")


def find_code(answer: str) -> str | None:
    """The last fenced block of the answer; None if there is no text to run.

    A block that the answer's end cuts off counts if no other is there. Without any fence, the whole answer is the program.
    """
    closed: list[str] | None = None
    inside: list[str] | None = None
    opening = ""
    for line in answer.splitlines():
        fence = FENCE.match(line)
        if inside is None and fence:
            opening, inside = fence[1], []
        elif inside is not None and fence and fence[1].startswith(opening) and not fence[2].strip():
            closed, inside = inside, None
        elif inside is not None:
            inside.append(line)
    block = closed if closed is not None else inside
    code = answer if block is None else "\n".join(block) + "\n"
    return code if code.strip() else None
