"""The distribution djinn-native: versions agree, and sources fit the rules for other code."""

from __future__ import annotations

import ast
import tomllib

import pytest
from packaging.specifiers import SpecifierSet

import djinn

TRIED_MINORS = [f"2.{minor}" for minor in range(30)]


@pytest.fixture
def table(root):
    return tomllib.loads((root / "djinn_native" / "pyproject.toml").read_text())


def torch_bounds(requirements):
    (found,) = [text.removeprefix("torch") for text in requirements if text.startswith("torch")]
    return SpecifierSet(found)


def test_version_matches_djinn_and_pins_it(root, table):
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse((root / "djinn_native" / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    assert constants["__version__"] == table["project"]["version"] == djinn.__version__
    assert f"djinn=={djinn.__version__}" in table["project"]["dependencies"]


def test_torch_bounds_admit_exactly_the_supported_minors(table):
    bounds = torch_bounds(table["project"]["dependencies"])
    admitted = [minor for minor in TRIED_MINORS if bounds.contains(f"{minor}.0")]
    assert admitted == table["tool"]["djinn-native"]["torch-minors"]


def test_default_torch_of_the_makefile_is_supported(root, table):
    defaults = [f"torch==$(or $(HERE),{minor}.0)" for minor in table["tool"]["djinn-native"]["torch-minors"]]
    assert any(default in (root / "Makefile").read_text() for default in defaults)
