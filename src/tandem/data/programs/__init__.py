"""Data sets of programs: each layout of columns is a file, and all give the case format of `tandem.api.program_tests`."""

from collections.abc import Mapping
from typing import Any

from tandem.api.program_tests import COLUMN
from tandem.data.programs.apps import APPS
from tandem.data.programs.humaneval import HUMANEVAL
from tandem.data.programs.layout import ProgramLayout
from tandem.data.programs.livecodebench import LIVECODEBENCH
from tandem.data.programs.mbpp import MBPP

LAYOUTS = (HUMANEVAL, MBPP, LIVECODEBENCH, APPS)


def find_layout(columns: Mapping[str, Any]) -> ProgramLayout | None:
    """The layout that has these columns; None for rows that are no programs, or that have the case format already."""
    if COLUMN in columns:
        return None
    return next((layout for layout in LAYOUTS if set(layout.columns) <= set(columns)), None)
