"""Writes the tables of docs/sandbox.md from the tests that make them true, between markers; the rest is left alone.

python scripts/sandbox_page.py            # rewrite
python scripts/sandbox_page.py --check    # exit 1 if the page is not up to date
"""

import re
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.sandbox.environments import DOCKER, ENVIRONMENTS  # noqa: E402 after the path
from tests.sandbox.hostile import read_table  # noqa: E402

PAGE = ROOT / "docs/sandbox.md"
BLOCK = re.compile(r"(<!-- from the tests: (\w+) -->\n).*?(<!-- end -->)", re.S)


def environments() -> str:
    """The back end that is chosen on each kind of machine."""
    rows = [f"| {each.name} | {each.chosen} |" for each in ENVIRONMENTS]
    return "\n".join(["| machine | `sandbox=auto` |", "|---|---|", *rows]) + "\n"


def docker() -> str:
    """The back end that is chosen in docker, by its options."""
    rows = [f"| `docker run{' ' * bool(options)}{options}` | {chosen} |" for options, chosen in DOCKER.items()]
    return "\n".join(["| container | `sandbox=auto` |", "|---|---|", *rows]) + "\n"


def hostile() -> str:
    """The attacks that were tried, and how each may end."""
    table = read_table()
    lines = [f"{len(table)} programs; none of them gets anything, in either back end.", ""]
    for group, programs in groupby(table, lambda each: each.group):
        lines += [f"**{group[0].upper()}{group[1:]}**", "", "| program | may end as |", "|---|---|"]
        lines += [f"| {each.name} | {', '.join(sorted(each.ends))} |" for each in programs]
        lines.append("")
    return "\n".join(lines)


def render(page: str) -> str:
    """The page with its tables written anew."""
    tables = {"environments": environments(), "docker": docker(), "hostile": hostile()}
    return BLOCK.sub(lambda match: match[1] + tables[match[2]] + match[3], page)


def main() -> None:
    """Rewrites or checks."""
    text = PAGE.read_text()
    if "--check" in sys.argv:
        sys.exit(render(text) != text)
    PAGE.write_text(render(text))


if __name__ == "__main__":
    main()
