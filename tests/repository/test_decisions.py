"""Decisions have one head: date, status and links to the decisions that change them, in both directions."""

import datetime as dt
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"
PAGES = {int(path.name[:4]): path for path in sorted(FOLDER.glob("[0-9]*.md"))}
HEAD = re.compile(
    r"# (?P<number>\d+)\. (?P<title>.+)\n\n"
    r"- Date: (?P<date>\d{4}-\d{2}-\d{2})\n"
    r"- Status: (?P<status>accepted|accepted, amended by (?P<amended>.+)|superseded by (?P<superseded>.+))\n"
    r"(- Supersedes: (?P<supersedes>.+)\n)?"
    r"(- Amends: (?P<amends>.+)\n)?"
    r"\n\S"
)
LINK = re.compile(r"\[decision (\d+)\]\((\d{4}-[\w-]+\.md)\)")
OPPOSITE = {"amended": "amends", "superseded": "supersedes", "amends": "amended", "supersedes": "superseded"}


def head(number):
    found = HEAD.match(PAGES[number].read_text(encoding="utf-8"))
    assert found, f"the head of {PAGES[number].name} is not as in the others"
    return found.groupdict()


def linked(text):
    """Numbers of the decisions that a line of the head names."""
    links = LINK.findall(text or "")
    assert ", ".join(f"[decision {number}]({name})" for number, name in links) == (text or "")
    assert all(PAGES[int(number)].name == name for number, name in links)
    return {int(number) for number, _ in links}


def test_numbers_have_no_gaps():
    assert list(PAGES) == list(range(1, len(PAGES) + 1))


@pytest.mark.parametrize("number", PAGES)
def test_the_head_has_number_date_and_status(number):
    found = head(number)
    assert int(found["number"]) == number
    assert dt.date.fromisoformat(found["date"]) >= dt.date.fromisoformat(head(max(1, number - 1))["date"])


@pytest.mark.parametrize("number", PAGES)
def test_links_to_other_decisions_go_both_ways(number):
    found = head(number)
    for line, opposite in OPPOSITE.items():
        for other in linked(found[line]):
            assert (other > number) == (line in {"amended", "superseded"})
            assert number in linked(head(other)[opposite]), f"decision {other} does not name {number}"


@pytest.mark.parametrize("number", PAGES)
def test_the_index_lists_it(number):
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = head(number)
    line = re.search(rf"^{number}\. \[(.+)\]\({PAGES[number].name}\)(.*)$", index, flags=re.MULTILINE)
    assert line, f"the index does not list decision {number}"
    assert line[2] == "".join(f", superseded by {other}" for other in linked(found["superseded"]))
