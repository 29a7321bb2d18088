"""All packages of the repository have one version, and require each other in exactly that version."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

import djinn

PACKAGES = (
    "pyproject.toml",
    "djinn_native/pyproject.toml",
    "djinn_server/pyproject.toml",
    "plugins/*/pyproject.toml",
)
CONSTANTS = ("djinn_core/__init__.py", "djinn_native/__init__.py", "djinn_server/__init__.py")
CHART = "packaging/kubernetes/djinn/Chart.yaml"
OURS = re.compile(r"(djinn(?:-[a-z-]+)?)(?:\[[\w,]+\])?(.*)")


def projects(root):
    """Yield path and table of each package."""
    for pattern in PACKAGES:
        for path in sorted(root.glob(pattern)):
            yield str(path.relative_to(root)), tomllib.loads(path.read_text())["project"]


def requirements(table):
    """Yield name and versions of each requirement on a package of this repository."""
    for requirement in table.get("dependencies", ()):
        if found := OURS.fullmatch(requirement):
            yield found.groups()


def stated(root):
    """Return each version that a file states, by file and what it is of."""
    found = {}
    for path, table in projects(root):
        found[path, "version"] = table["version"]
        for name, versions in requirements(table):
            found[path, name] = versions.removeprefix("==")
    for path in CONSTANTS:
        found[path, "version"] = re.search(r'^__version__ = "(.+)"$', (root / path).read_text(), re.MULTILINE)[1]
    found[CHART, "appVersion"] = re.search(r'^appVersion: "(.+)"$', (root / CHART).read_text(), re.MULTILINE)[1]
    return found


def test_versions_and_pins_agree(root):
    found = stated(root)
    assert {place: version for place, version in found.items() if version != djinn.__version__} == {}
    assert len(found) > 2 * len(PACKAGES + CONSTANTS)


def test_first_party_packages_require_each_other_exactly(root):
    required = {path: dict(requirements(table)) for path, table in projects(root)}
    assert {"djinn", "djinn-server", "djinn-tcp"} <= {name for each in required.values() for name in each}
    assert {path: each for path, each in required.items() if not all(map(is_exact, each.values()))} == {}
    assert all("djinn" in each for path, each in required.items() if path != "pyproject.toml")


def is_exact(versions):
    return versions.startswith("==")


def test_template_accepts_later_releases(root):
    for path in (root / "templates" / "plugin").rglob("pyproject.toml"):
        required = dict(requirements(tomllib.loads(path.read_text())["project"]))
        assert set(required.values()) == {">=26"}, path


def call(root, *command):
    return subprocess.run([sys.executable, *command], cwd=root, capture_output=True, text=True, check=False)


def test_set_version_changes_all_packages(root, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["git", "clone", "-q", root, copy], check=True)
    done = call(root, "packaging/set_version.py", "26.12.0rc1", "--root", copy)
    assert done.returncode == 0, done.stderr
    assert {place: version for place, version in stated(copy).items() if version != "26.12.0rc1"} == {}
    again = call(root, "packaging/set_version.py", "26.12.0", "--root", copy)
    assert again.returncode == 0, again.stderr
    assert set(stated(copy).values()) == {"26.12.0"}


@pytest.mark.parametrize("version", ["1.0.0", "26.13.0", "26.12", "26.12.0+here", "next"])
def test_set_version_refuses_other_versions(root, tmp_path, version):
    done = call(root, "packaging/set_version.py", version, "--root", tmp_path)
    assert done.returncode
    assert "YEAR.MONTH.PATCH" in done.stderr
