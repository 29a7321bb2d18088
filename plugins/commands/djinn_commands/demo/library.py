"""Texts for the demo: the docstrings of Python's standard library."""

from __future__ import annotations

import importlib
import inspect
import textwrap

import attrs

MODULES = (
    "bisect collections contextlib copy fnmatch functools glob heapq itertools json os.path random re shutil statistics "
    "string subprocess tempfile textwrap zipfile"
).split()
SHORTEST = 30  # minimum length in characters; shorter texts have no content to search for
LONGEST = 300


@attrs.frozen
class Passage:
    """A text that describes a function or class.

    Attributes:
        name: full name of the function or class.
        text: first paragraph of its docstring.
    """

    name: str
    text: str


def passages() -> list[Passage]:
    """Return one passage for each public function and class of `MODULES`, sorted by name."""
    passage_list = []
    for module in MODULES:
        members = vars(importlib.import_module(module))
        for name in sorted(members.get("__all__", members)):
            text = _summary(name, members[name])
            if text:
                passage_list.append(Passage(f"{module}.{name}", text))
    return passage_list


def _summary(name: str, member: object) -> str:
    """Return the first paragraph of a member's docstring that is not a signature, or an empty string."""
    is_error = isinstance(member, type) and issubclass(member, BaseException)
    if name.startswith("_") or is_error or not callable(member):
        return ""
    paragraphs = [" ".join(p.split()) for p in (inspect.getdoc(member) or "").split("\n\n")]
    summaries = [p for p in paragraphs if len(p) >= SHORTEST and not p.startswith(f"{name}(")]
    return textwrap.shorten(summaries[0], LONGEST) if summaries else ""
