"""Entries of the changelog are in files that towncrier finds."""

import subprocess
import sys


def fragments(root):
    return [path for path in sorted((root / "changelog.d").iterdir()) if path.name not in {"README.md", "template.md"}]


def test_towncrier_joins_all_entries(root):
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "99.1.0", "--date", "2099-01-01"]
    drafted = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=580).stdout
    assert drafted.startswith("## [99.1.0] - 2099-01-01\n\n")
    lines = drafted.splitlines()
    assert [line for path in fragments(root) for line in path.read_text().splitlines() if line not in lines] == []
