"""All packages of the repository have one version, and require each other in exactly that version."""

from __future__ import annotations

import re
import shutil
import subprocess
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


@pytest.fixture
def command(root):
    """The command of RELEASING.md that sets the version of all packages."""
    (found,) = re.findall(r"```sh\n([^`]*sed -i[^`]*)```", (root / "RELEASING.md").read_text())
    return found


def test_command_for_a_release_changes_all_of_them(root, files, command, tmp_path):
    for path in files:
        if path.name in {"pyproject.toml", "__init__.py", "Chart.yaml", "kuberay.yaml"} or path.suffix == ".md":
            copy = tmp_path / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    assert f"old={djinn.__version__} " in command
    subprocess.run(["sh", "-ec", re.sub(r"new=\S+", "new=99.1.0", command)], cwd=tmp_path, check=True)
    assert {place: version for place, version in stated(tmp_path).items() if version != "99.1.0"} == {}
