"""The language of code and documents: texts say who acts, and a docstring begins with what a thing is or does."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ("djinn", "djinn_core", "plugins", "tests", "benchmarks", "examples", "templates")
TEXTS = ("docs", "plugins", "templates", "benchmarks", "tests", "packaging", "changelog.d")
RELATIVE = re.compile(r"(What|Whether|Whoever|Who|Whom|Whose|Which|Where|When|How|Why)\b")
INDEFINITE = re.compile(
    r"\b(somebody|someone|nobody|no one|whoever|whomever|anybody|anyone|everybody|everyone)\b", re.IGNORECASE
)


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


@pytest.mark.parametrize("path", [*sources(), *documents()], ids=lambda path: str(path.relative_to(ROOT)))
def test_texts_say_who_acts(path):
    indefinite = [
        f"{number}: {line.strip()}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if INDEFINITE.search(line)
    ]
    assert indefinite == []
