"""How `make site` turns the pages of docs/ into a site: Sphinx, with MyST for the Markdown that stands here."""

import re
from pathlib import Path

DOCS = Path(__file__).parent

project = "Tandem"
html_title = "Tandem"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # links go to headings by GitHub's rule
default_role = "code"  # docstrings write names in single backticks, as the pages do
autodoc_member_order = "bysource"
html_show_copyright = False
html_show_sphinx = False

LINK = re.compile(r"\]\(([\w/]+)\.md\)")


def contents(app, page: str, text: list[str]) -> None:
    """Sphinx wants to be told its table of contents: each section of index.md is one, of the pages that it links to."""
    if page != "index":
        return
    parts = re.split(r"^## (.*)$", text[0], flags=re.M)
    for title, section in zip(parts[1::2], parts[2::2], strict=True):
        pages = list(dict.fromkeys(LINK.findall(section)))
        text[0] += "\n".join(["\n```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```\n"])


def setup(app) -> None:
    """Called by Sphinx."""
    app.connect("source-read", contents)
