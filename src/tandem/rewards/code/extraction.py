"""Finding the program in an answer. Linear in the text, whatever it holds."""

import re

FENCE = re.compile(r"([ ]{0,3})(`{3,}|~{3,})([^`\n]*)$")
MARK = "\ufeff"
"""A byte order mark, which Python refuses in a text."""


def find_code(answer: str) -> str | None:
    """The last fenced block of the answer; None if there is no text to run.

    A block that the answer's end cuts off counts if no other is there. Without any fence, the whole answer is the program.
    Lines end where they do for Python. Where the first begins below its fence, all lose the blanks that the fence has.
    """
    answer = answer.removeprefix(MARK)
    closed: list[str] | None = None
    inside: list[str] | None = None
    opening = ""
    for line in re.split(r"\r\n?|\n", answer):
        fence = FENCE.match(line)
        if inside is None and fence:
            opening, inside = fence[2], [fence[1]]
        elif inside is not None and fence and fence[2].startswith(opening) and not fence[3].strip():
            closed, inside = inside, None
        elif inside is not None:
            inside.append(line)
    block = closed if closed is not None else inside
    code, indent = answer, ""
    if block is not None:
        indent, *lines = block
        code = "\n".join([*lines, ""])
    if re.match(rf"(?:[ \t]*\n)*{indent}\S", code):
        code = re.sub(rf"^ {{0,{len(indent)}}}", "", code, flags=re.MULTILINE)
    code = code.removeprefix(MARK)
    return code if code.strip() else None
