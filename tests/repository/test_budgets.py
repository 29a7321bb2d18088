"""`packaging/budgets.py` bounds the size of the repository. The tests run a copy of the script in a small checkout of their own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs
import pytest

FILES = {
    "djinn/__init__.py": '__all__ = ["a", "b"]\n',
    "djinn/hooks.py": '__all__ = ["c"]\n',
    "djinn/_private.py": '__all__ = ["d"]\n',
    "djinn/inner/__init__.py": "",
    "djinn/inner/module.py": "",
    "djinn_native/csrc/code.cpp": "//\n" * 3,
    "docs/image.svg": "<svg>\n" * 100,
    "docs/page.md": "One two three.\n",
    "docs/decisions/0001.md": "No page of the documents.\n",
    "plugins/some/djinn_some/__init__.py": "",
    "plugins/some/djinn_some/matcher.py": "import djinn.hooks\n",
    "plugins/some/pyproject.toml": "#\n" * 4,
    "README.md": "# Title\n\nFour words of text.\n",
    "budgets.toml": """\
# The comment stays.
[lines]
djinn = 99
"djinn_native/csrc" = 99 # this one, too
docs = 99
packaging = 9_999
plugins = 99
gone = 99
"." = 99
total = 9_999

[languages]
python = 9_999
cpp = 99
configuration = 99
markdown = 99

[import_circles]
modules = 99
folders = 99
packages = 99

[counts]
plugin_packages = 99
public_names = 99
pages = 99
words = 99

[limits]
python_file = 900
cpp_file = 900
""",
}
# With the figures that exceed their budgets then.
CHANGES = {
    "djinn/hooks.py": '\n\n__all__ = ["c", "e"]\n',
    "djinn/longest.py": "#\n" * 901,
    "djinn_native/csrc/code.cpp": "//\n" * 4,
    "djinn_native/csrc/code.h": "//\n" * 902,
    "djinn_native/setup.py": "#\n",
    "docs/decisions/0002.md": "New.\n",
    "docs/image.svg": "<svg>\n" * 999,
    "docs/new.md": "One.\n",
    "new/run": "exit\n",
    "plugins/new/pyproject.toml": "#\n",
}
EXCEEDED = {
    "lines.djinn": 906,
    "lines.djinn_native/csrc": 906,
    "lines.djinn_native": 1,
    "lines.docs": 4,
    "lines.new": 1,
    "lines.plugins": 6,
    "languages.cpp": 906,
    "languages.markdown": 7,
    "languages.shell": 1,
    "counts.plugin_packages": 2,
    "counts.public_names": 4,
    "counts.pages": 3,
    "counts.words": 10,
    "limits.python_file": 901,
    "limits.cpp_file": 902,
}
OF_ALL_FOLDERS = {"lines.total", "languages.python", "languages.configuration"}
CIRCLES = {
    "modules": {
        "djinn/_private.py": "import djinn.hooks\n",
        "djinn/hooks.py": "def f():\n    import djinn._private\n",
    },
    "folders": {
        "djinn/hooks.py": "from djinn.inner import module\n",
        "djinn/inner/module.py": "import djinn._private\n",
    },
    "packages": {
        "djinn/inner/module.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import djinn_some.matcher\n",
    },
}


@attrs.frozen
class Checkout:
    root: Path

    @property
    def budgets(self):
        return (self.root / "budgets.toml").read_text()

    def write(self, files):
        for name, text in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)

    def run(self, action):
        command = [sys.executable, self.root / "packaging" / "budgets.py", action]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def exceeded(self):
        """Return the figures above their budgets and the message of `--check`."""
        done = self.run("--check")
        found = re.findall(r"^budgets.toml: (\S+) is [\d_]+, measured ([\d_]+)\. Look at .", done.stderr, re.MULTILINE)
        assert done.returncode == (1 if found else 0), done.stderr
        return {name: int(figure) for name, figure in found}, done.stderr


@pytest.fixture(scope="module")
def exact(tmp_path_factory, root):
    """A checkout whose budgets are what is measured."""
    checkout = Checkout(tmp_path_factory.mktemp("exact"))
    checkout.write(FILES | {"packaging/budgets.py": (root / "packaging" / "budgets.py").read_text()})
    subprocess.run(["git", "init", "-q"], cwd=checkout.root, check=True)
    assert checkout.run("--lower").returncode == 0
    return checkout


@pytest.fixture
def checkout(exact, tmp_path):
    shutil.copytree(exact.root, tmp_path, dirs_exist_ok=True)
    return Checkout(tmp_path)


def test_lower_writes_measurements_and_keeps_comments(exact):
    budgets = tomllib.loads(exact.budgets)
    assert exact.budgets.startswith("# The comment stays.\n[lines]\ndjinn = 3\n")
    assert '"djinn_native/csrc" = 3 # this one, too\n' in exact.budgets
    lines = budgets["lines"]
    assert {name: lines[name] for name in ("docs", "gone", "plugins")} == {"docs": 2, "gone": 0, "plugins": 5}
    assert lines.pop("total") == sum(lines.values()) == sum(budgets["languages"].values())
    assert budgets["import_circles"] == {"modules": 0, "folders": 0, "packages": 0}
    assert budgets["counts"] == {"plugin_packages": 1, "public_names": 3, "pages": 2, "words": 9}
    assert budgets["limits"] == {"python_file": 900, "cpp_file": 900}


def test_check_passes_at_the_budget(exact):
    assert exact.exceeded() == ({}, "")


def test_check_fails_above_each_budget(checkout):
    budgets = checkout.budgets
    checkout.write(CHANGES)
    found, message = checkout.exceeded()
    assert {name: found.get(name) for name in EXCEEDED} == EXCEEDED
    assert found.keys() == EXCEEDED.keys() | OF_ALL_FOLDERS
    assert "lines.djinn is 3, measured 906. Look at djinn (longest file: djinn/longest.py, 901 lines)\n" in message
    assert message.endswith("Lower each figure, or raise its budget in a commit of its own that says why.\n")
    assert checkout.run("--lower").returncode == 0
    assert checkout.budgets == budgets


@pytest.mark.parametrize("kind", CIRCLES)
def test_check_shows_new_import_cycle(checkout, kind):
    checkout.write(CIRCLES[kind])
    found, message = checkout.exceeded()
    assert {name for name in found if name.startswith("import_circles")} == {f"import_circles.{kind}"}
    assert found[f"import_circles.{kind}"] == 2
    assert re.search(r"^    2 in a circle, for example (djinn\S*) -> djinn\S* -> \1$", message, re.MULTILINE)


def test_check_outside_git_checkout_passes(checkout):
    shutil.rmtree(checkout.root / ".git")
    checkout.write(CHANGES)
    done = checkout.run("--check")
    assert done.returncode == 0
    assert "not a git checkout" in done.stderr
