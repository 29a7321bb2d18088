"""Layering: the imports that each package is allowed."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

import djinn_core


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def test_every_module_has_its_layer_and_each_map_shows_it(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())
    layers = next(c["layers"] for c in project["tool"]["importlinter"]["contracts"] if c["id"] == "layers")
    order = [name.removeprefix("djinn_core.") for layer in layers for name in layer.split(" | ")]
    entries = (root / "djinn_core").glob("[a-z]*")
    there = {path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(order) == there | {"djinn"}
    (listed,) = re.findall(
        r"^```\n(djinn  .+?)^```", (root / "docs" / "architecture.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert re.findall(r"(?<=djinn_core\.)\w+", listed) == order[1:]
    assert set(re.findall(r"`(\w+)`", djinn_core.__doc__)) >= there


@pytest.mark.parametrize("package", ["runtime", "server"])
def test_the_map_of_a_package_names_its_modules(root, package):
    folder = root / "djinn_core" / package
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    there = {path.stem for path in folder.glob("[a-z]*") if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(re.findall(r"`(\w+)`", text)) - {"djinn"} == there


def test_plugins_never_import_the_implementation(root, sources):
    plugins = [path for path in sources if path.is_relative_to(root / "plugins")]
    guilty = [
        f"{path.relative_to(root)} imports {name}"
        for path in plugins
        for name in imports(path)
        if name.split(".")[0] == "djinn_core"
    ]
    assert not guilty


def test_how_a_handle_is_laid_out_is_known_to_few_modules(root):
    shift = re.compile(r"(?:<<|>>) *(?:\w*VIEW_BITS|32\b)")
    core = root / "djinn_core"
    found = {
        path.relative_to(core).as_posix()
        for path in core.rglob("*.py")
        if any(shift.search(line) and "COUNT_MASK" not in line for line in path.read_text().splitlines())
    }
    assert found == {"ir/handles.py", "server/running/values.py", "wire/binding_delta.py"}


def test_the_public_modules_but_for_testing_hold_no_logic(root):
    makers = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in (root / "djinn").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, makers)
    ]
    assert not found
