"""A plugin's names follow from its folder, and it cannot be installed beside another project's `djinn`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import djinn
from djinn_core.registry.kinds import EVERY_KIND

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))


def project(package):
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def test_there_are_plugins():
    assert PACKAGES


def test_all_packages_have_one_version():
    assert {project(package)["version"] for package in (ROOT, *PACKAGES)} == {djinn.__version__}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
class TestPackage:
    def test_names_follow_from_the_folder(self, package):
        table = project(package)
        assert table["name"] == f"djinn-{package.name.replace('_', '-')}"
        assert (package / f"djinn_{package.name}" / "__init__.py").exists()
        ((name, target),) = table["entry-points"]["djinn"].items()
        assert name == package.name
        assert target.split(":")[0].split(".")[0] == f"djinn_{package.name}"
        assert package.parent.name in EVERY_KIND

    def test_needs_this_djinn(self, package):
        table = project(package)
        assert "djinn>=26" in table["dependencies"]
        assert table["version"].startswith("26.")

    def test_has_a_readme_tests_and_types(self, package):
        assert (package / "README.md").read_text().strip()
        assert list((package / "tests").glob("test_*.py"))
        assert (package / f"djinn_{package.name}" / "py.typed").exists()
