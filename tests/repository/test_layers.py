"""Layering: the imports that each package is allowed."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def modules(folder):
    return {path.stem for path in folder.glob("[a-z]*") if path.suffix == ".py" or (path / "__init__.py").exists()}


@pytest.mark.parametrize("package", ["core", "client"])
def test_every_module_has_layer_in_map(root, package):
    project = tomllib.loads((root / "pyproject.toml").read_text())
    layers = next(c["layers"] for c in project["tool"]["importlinter"]["contracts"] if c["id"] == package)
    order = [name.removeprefix(f"djinn_{package}.") for layer in layers for name in layer.split(" | ")]
    assert set(order) == modules(root / f"djinn_{package}")
    maps = re.findall(
        r"^```\n(djinn_.+?)^```", (root / "docs" / "architecture.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert order in [re.findall(rf"(?<=djinn_{package}\.)\w+", listed) for listed in maps]


@pytest.mark.parametrize("package", ["djinn_core", "djinn_client", "djinn_client/runtime", "djinn_server"])
def test_package_map_names_its_modules(root, package):
    text = ast.get_docstring(ast.parse((root / package / "__init__.py").read_text()))
    named = set(re.findall(r"`(\w+)`", text)) - {"djinn"}
    assert named == modules(root / package)


def test_plugin_imports_client_or_server_only(root, sources):
    used = {}
    for path in sources:
        if path.is_relative_to(root / "plugins"):
            used.setdefault(path.relative_to(root).parts[:2], set()).update(
                name.split(".")[0] for name in imports(path)
            )
    assert not [place for place, names in used.items() if {"djinn_client", "djinn_server"} <= names]


def test_templates_and_examples_import_djinn_only(root, files):
    """Each kind of plugin has a template, and its suite passes: what authors of plugins need is in `djinn`."""
    inner = re.compile(r"""^[\s"]*(?:from|import) djinn_(?:core|client|server|native)\b""", re.MULTILINE)
    copied = [
        path
        for path in files
        if path.relative_to(root).parts[0] in {"templates", "examples"} and path.suffix in {".py", ".ipynb", ".md"}
    ]
    copied += [root / "README.md", root / "docs" / "plugins.md", root / "docs" / "api.md"]
    assert len(copied) > 40
    assert not [str(path.relative_to(root)) for path in copied if inner.search(path.read_text())]


def test_handle_layout_is_known_to_few_modules(root):
    shift = re.compile(r"(?:<<|>>) *(?:\w*VIEW_BITS|32\b)")
    found = {
        path.relative_to(root).as_posix()
        for package in ("djinn_core", "djinn_client", "djinn_server")
        for path in (root / package).rglob("*.py")
        if any(shift.search(line) and "COUNT_MASK" not in line for line in path.read_text().splitlines())
    }
    assert found == {"djinn_core/ir/handles.py", "djinn_server/running/values.py", "djinn_core/wire/binding_delta.py"}


def test_public_modules_hold_no_logic(root):
    makers = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in (root / "djinn").glob("*.py")
        if path.name != "_lazy_names.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, makers)
    ]
    assert not found
