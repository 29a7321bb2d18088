"""The language of code and documents: texts say who acts, and a docstring begins with what a thing is or does."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ("djinn", "djinn_core", "djinn_native", "plugins", "tests", "benchmarks", "examples", "templates")
TEXTS = ("docs", "djinn_native", "plugins", "templates", "benchmarks", "tests", "packaging", "changelog.d")
RELATIVE = re.compile(r"(What|Whether|Whoever|Who|Whom|Whose|Which|Where|When|How|Why)\b")
POSSIBLE = re.compile(rf"[\"']\s*{RELATIVE.pattern}")  # in a text that need not be parsed where this is not found
WORDS = ("somebody", "someone", "nobody", "no one", "whoever", "whomever", "anybody", "anyone", "everybody", "everyone")
INDEFINITE = re.compile(rf"\b({'|'.join(WORDS)})\b")


def sources():
    for folder in PYTHON:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path != Path(__file__):
                yield path


def documents():
    yield from sorted(ROOT.glob("*.md"))
    yield from (ROOT / name for name in ("Makefile", "pyproject.toml"))
    for folder in TEXTS:
        yield from sorted((ROOT / folder).rglob("*.md"))


def parsed(path):
    try:
        return ast.parse(path.read_text())
    except SyntaxError:
        assert path.relative_to(ROOT).parts[0] == "templates", path  # placeholders until it is rendered
        return ast.Module([], [])


def docstrings(path):
    if not POSSIBLE.search(path.read_text()):
        return
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


@pytest.mark.parametrize("folder", PYTHON)
def test_docstrings_begin_with_a_noun_or_a_verb(folder):
    relative = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] == folder
        for line, text in docstrings(path)
        if RELATIVE.match(text)
    ]
    assert relative == []


@pytest.mark.parametrize("paths", [sources, documents])
def test_texts_say_who_acts(paths):
    indefinite = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths()
        if any(word in (lower := path.read_text().lower()) for word in WORDS)
        for number, line in enumerate(lower.splitlines(), 1)
        if INDEFINITE.search(line)
    ]
    assert indefinite == []


def test_a_class_name_of_the_core_stands_for_one_class():
    found = Counter(
        name
        for path in (ROOT / "djinn_core").rglob("*.py")
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.MULTILINE)
    )
    assert [name for name, count in found.items() if count > 1] == []
