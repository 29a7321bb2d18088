"""The documents' Python runs, and their links lead somewhere.

The blocks of one document run in order, as one program. A block is left out with a comment on the line before it:
`<!-- not run: reason -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(path for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md") for path in ROOT.glob(pattern))
RESULTS = sorted((ROOT / "evaluation" / "results").glob("*.md"))
BLOCK = re.compile(r"^(?P<before>[^\n]*)\n```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
SKIPPED = re.compile(r"<!-- not run: .{10,} -->")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?!https?:|mailto:|#)([^)#\s]+)")


def label(path):
    return str(path.relative_to(ROOT))


def program(path):
    """The document's blocks as one program, each block on the line that it has in the document."""
    text = path.read_text()
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        if SKIPPED.search(block["before"]):
            continue
        start = text.count("\n", 0, block.start("code"))
        code = block["code"].splitlines()
        lines[start : start + len(code)] = code
    return "\n".join(lines)


RUN = [path for path in DOCUMENTS if program(path).strip()]


@pytest.mark.parametrize("path", RUN, ids=label)
def test_documented_python_runs(path, tmp_path, request, python, plain_environment):
    script = tmp_path / f"{path.stem}.py"
    script.write_text(program(path))
    # What people read first runs as it does for them, with nothing configured; the others share a server.
    own = path == ROOT / "README.md"
    environment = plain_environment if own else request.getfixturevalue("served_environment")
    done = python.run(script, cwd=tmp_path, env=environment)
    assert done.returncode == 0, f"{label(path)}: {done.stderr[-2000:]}"


def test_links_resolve():
    links = [(path, link) for path in (*DOCUMENTS, *RESULTS) for link in LINK.findall(path.read_text())]
    assert [(label(path), link) for path, link in links if not (path.parent / link).exists()] == []


def test_changelog_has_current_version():
    version = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    released = f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert released or any((ROOT / "changelog.d").glob("+*.md"))
