"""Entries of the changelog are short lines in files that towncrier finds."""

import re
import subprocess
import sys

TYPES = ("added", "changed", "deprecated", "removed", "fixed", "security")
LONGEST = 150


def fragments(root):
    return [path for path in sorted((root / "changelog.d").iterdir()) if path.name not in {"README.md", "template.md"}]


def test_entries_are_one_line_each(root):
    wrong = [
        f"{path.name}:{number}: {line}"
        for path in fragments(root)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if not re.fullmatch(r"- \S.*[.!)]", line) or len(line) > LONGEST
    ]
    assert wrong == []


def test_names_say_the_type(root):
    assert [
        path.name for path in fragments(root) if not re.fullmatch(rf"\+[\w-]+\.({'|'.join(TYPES)})\.md", path.name)
    ] == []


def test_towncrier_joins_all_of_them(root):
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "99.1.0", "--date", "2099-01-01"]
    drafted = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=580).stdout
    assert drafted.startswith("## [99.1.0] - 2099-01-01\n\n")
    lines = drafted.splitlines()
    assert [line for path in fragments(root) for line in path.read_text().splitlines() if line not in lines] == []


def test_releases_are_written_below_the_mark(root):
    text = (root / "CHANGELOG.md").read_text()
    unreleased, released = text.split("<!-- towncrier release notes start -->\n")
    assert unreleased.count("\n## ") == 1
    assert "\n## [Unreleased]\n" in unreleased
    assert all(
        re.match(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d\n", part)
        for part in re.split(r"^## ", released, flags=re.MULTILINE)[1:]
    )
