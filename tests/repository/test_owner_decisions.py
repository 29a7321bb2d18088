"""The owner's decisions, licence and name, are one command each, tried on a copy of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import pytest


@pytest.fixture
def copy(root, tmp_path):
    subprocess.run(["git", "clone", "-q", root, tmp_path / "copy"], check=True)
    return tmp_path / "copy"


@pytest.fixture
def small(tmp_path):
    """A checkout of one file."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "README.md").write_text("Djinn\n")
    subprocess.run(["git", "add", "README.md"], cwd=tmp_path, check=True)
    return tmp_path


def call(root, *command, **environment):
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=os.environ | environment)


def git(copy, *arguments):
    return subprocess.run(["git", *arguments], cwd=copy, capture_output=True, text=True, check=False).stdout


def test_rename_changes_all_files(root, copy):
    (copy / "djinn" / "__pycache__").mkdir()
    done = call(root, "packaging/rename.py", "genio", "--root", copy)
    assert done.returncode == 0, done.stderr
    assert "public package index" in done.stdout
    assert git(copy, "grep", "-il", "djinn") == ""
    assert "djinn" not in git(copy, "ls-files").lower()
    assert [*copy.glob("**/*djinn*")] == []
    assert (copy / "genio_core" / "__init__.py").is_file()
    program = "import genio_core.errors as e, genio_core.hookspecs as h; print(e.GenioError.__name__, h.API_VERSION)"
    ran = call(copy, "-c", program, PYTHONPATH=str(copy))
    assert ran.stdout.startswith("GenioError "), ran.stderr
    assert call(copy, "-m", "ruff", "check", "--quiet", "--no-cache", ".").returncode == 0


@pytest.mark.parametrize("name", ["two-words", "Capital", "1st", "djinnx", "", "a/b"])
def test_unusable_names_are_refused(root, small, name):
    done = call(root, "packaging/rename.py", name, "--root", small)
    assert done.returncode
    assert "is no name" in done.stderr
    assert (small / "README.md").read_text() == "Djinn\n"


def test_modified_checkout_is_not_renamed(root, small):
    done = call(root, "packaging/rename.py", "genio", "--root", small)
    assert done.returncode
    assert "commit them first" in done.stderr


def test_licence_is_written_to_all_packages(root, copy, tmp_path):
    text = tmp_path / "text"
    for licence, written in (("mit", "MIT"), ("apache-2.0 or MIT", "Apache-2.0 OR MIT")):
        text.write_text(f"the text of {licence}\n")
        done = call(root, "packaging/licence.py", licence, "--text", text, "--root", copy)
        assert done.returncode == 0, done.stderr
        projects = [
            copy / "pyproject.toml",
            *copy.glob("djinn_*/pyproject.toml"),
            *copy.glob("plugins/*/pyproject.toml"),
        ]
        assert len(projects) > 20
        for path in projects:
            table = tomllib.loads(path.read_text())["project"]
            assert (table["license"], table["license-files"]) == (written, ["LICENSE"]), path
            assert (path.parent / "LICENSE").read_text() == f"the text of {licence}\n"
        assert f"## Licence\n\n{written}: [LICENSE](LICENSE)." in (copy / "README.md").read_text()


def test_unknown_licence_is_refused(root, small):
    done = call(root, "packaging/licence.py", "Nobody-1.0", "--root", small)
    assert done.returncode
    assert "SPDX" in done.stderr
    assert git(small, "ls-files", "--others") == ""
