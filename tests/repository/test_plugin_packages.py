"""The names of a package of plugins follow from its folder, and it requires the packages of Djinn that it imports."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
# Clients use such a package without djinn-server: only a server imports these modules, or a command that says what is missing.
SERVERS_MODULES = {
    "djinn_http/server.py",
    *(
        f"djinn_observability/dashboard/{name}.py"
        for name in ("dashboard_command", "listener", "metrics", "operations", "pages", "routes", "watcher")
    ),
}


WITHOUT_PLUGINS = {"launchers", "profiler"}  # their names are in `djinn.hooks` and `djinn.profiler`


def project(package):
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def test_plugin_packages_are_found():
    assert PACKAGES


def imported(path):
    """Yield module and name of each import in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((name.name, "") for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, name.name) for name in node.names)


@cache
def names_of_the_server():
    """Return the names of `djinn`'s modules that come from `djinn_server`. Each is imported when it is asked for."""
    return {
        (f"djinn.{path.stem}", name)
        for path in ROOT.glob("djinn/*.py")
        for module, name in imported(path)
        if module.startswith("djinn_server.")
    }


def from_server(module, name):
    return module.split(".")[0] == "djinn_server" or (module, name) in names_of_the_server()


def needs_server(package):
    """Return True if a plugin imports something of the server package."""
    files = (package / f"djinn_{package.name}").rglob("*.py")
    return any(
        from_server(*use)
        for path in files
        if str(path.relative_to(package)) not in SERVERS_MODULES
        for use in imported(path)
    )


def test_server_imports_are_found():
    for use in (
        ("djinn.hooks", "LocalEngine"),
        ("djinn.weights", "read_bytes"),
        ("djinn_server.launch", "tickets"),
    ):
        assert from_server(*use)
    for use in (("djinn.hooks", "Pattern"), ("djinn_client.runtime", "client"), ("djinn_core.logs", "get_logger")):
        assert not from_server(*use)


def plugins(package):
    """Return the names of the plugins of a package."""
    groups = project(package).get("entry-points", {})
    return {
        name
        for group, points in groups.items()
        if group == "djinn" or (group.startswith("djinn.") and group != "djinn.integrations")
        for name in points
    }


def test_installation_page_lists_all_packages():
    text = (ROOT / "docs" / "install.md").read_text()
    rows = re.findall(
        r"^\| \[`(\w+)`\]\(\.\./plugins/\w+/README\.md\) \| ([^|]*) \| (?:client|server|both) \| .+ \|$",
        text,
        re.MULTILINE,
    )
    listed = {folder: set(re.findall(r"`(\w+)`", names)) for folder, names in rows}
    assert listed == {package.name: plugins(package) for package in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
class TestPackage:
    def test_package_names_match_folder(self, package):
        table = project(package)
        assert table["name"] == f"djinn-{package.name.replace('_', '-')}"
        assert (package / f"djinn_{package.name}" / "__init__.py").exists()
        points = [
            point
            for group, some in table.get("entry-points", {}).items()
            if group.startswith("djinn.")
            for point in some.values()
        ]
        assert points or package.name in WITHOUT_PLUGINS
        for target in points:
            module = target.split(":")[0].split(".")
            assert module[0] == f"djinn_{package.name}"
            path = package.joinpath(*module)
            assert path.with_suffix(".py").exists() or (path / "__init__.py").exists()

    def test_package_requires_what_it_imports(self, package):
        table = project(package)
        assert f"djinn=={table['version']}" in table["dependencies"]
        assert (f"djinn-server=={table['version']}" in table["dependencies"]) == needs_server(package)

    def test_package_has_readme_tests_and_types(self, package):
        assert (package / "README.md").read_text().strip()
        assert list((package / "tests").glob("test_*.py"))
        assert (package / f"djinn_{package.name}" / "py.typed").exists()
