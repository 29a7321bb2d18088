"""Every dependency is explained, and nothing is explained that is none."""

from __future__ import annotations

import re
import tomllib

from evaluation.__main__ import PROGRAMS


def name_of(requirement):
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-")


def requirements(root, files):
    for path in files:
        if path.name != "pyproject.toml" or path.is_relative_to(root / "templates"):
            continue
        table = tomllib.loads(path.read_text())
        project = table["project"]
        yield from table["build-system"]["requires"]
        yield from project.get("dependencies", ())
        for extra in project.get("optional-dependencies", {}).values():
            yield from extra


def is_ours(name):
    """Return True for packages of this repository."""
    return name == "djinn" or name.startswith("djinn-")


def layers():
    return {program.layer for program in PROGRAMS.values() if program.layer is not None}


def test_docs_explain_exactly_the_dependencies(root, files):
    needed = {name_of(requirement) for requirement in requirements(root, files)}
    needed = {name for name in needed if not is_ours(name)}
    makefile = (root / "Makefile").read_text()
    needed |= {name_of(found) for found in re.findall(r"'([a-z0-9-]+)>=", makefile)}
    needed |= {name_of(package) for layer in layers() for package in layer.packages if ">=" in package}
    needed |= {name_of(found) for found in re.findall(r"^WEIGHTS\s*:=\s*(\S+)", makefile, re.MULTILINE)}
    document = (root / "docs" / "architecture.md").read_text().split("## Dependencies")[1]
    explained = {name.lower() for name in re.findall(r"^\| `([^`]+)` \|", document, re.MULTILINE)}
    assert needed == explained


def test_no_extra_names_an_unpublished_plugin(root):
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not [r for extra in extras.values() for r in extra if name_of(r).startswith("djinn-")]


def test_server_package_alone_requires_what_only_servers_need(root):
    servers_only = {"cryptography"}
    by_package = {
        name: {
            name_of(requirement) for requirement in tomllib.loads((root / name).read_text())["project"]["dependencies"]
        }
        for name in ("pyproject.toml", "djinn_native/pyproject.toml", "djinn_server/pyproject.toml")
    }
    assert {name for name, needed in by_package.items() if servers_only & needed} == {"djinn_server/pyproject.toml"}
    assert servers_only <= by_package["djinn_server/pyproject.toml"]


def locked(root):
    lines = (root / "requirements-dev.lock").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_lock_file_has_exact_versions_only(root):
    assert [line for line in locked(root) if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line)] == []


def test_lock_file_covers_development_extras(root):
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = re.fullmatch(r"djinn\[([\w,]+)\]", extras["dev"][0])[1].split(",")
    makefile = (root / "Makefile").read_text()
    others = {*re.findall(r"\$\(PINS\) .*'\.\[(\w+)\]'", makefile), "release"} - {"dev"}
    others |= {
        extra for layer in layers() if layer.locked for extra in re.findall(r"\.\[(\w+)\]", " ".join(layer.packages))
    }
    assert others >= {"libraries", "docs", "notebooks"}
    installed += others
    needed = {name_of(requirement) for extra in installed for requirement in extras[extra]}
    packages = ("pyproject.toml", "djinn_server/pyproject.toml", "plugins/*/pyproject.toml")
    for path in (path for pattern in packages for path in root.glob(pattern)):
        needed |= {name_of(requirement) for requirement in tomllib.loads(path.read_text())["project"]["dependencies"]}
    missing = needed - {name_of(line) for line in locked(root)} - {"torch"}
    assert not {name for name in missing if not is_ours(name)}, "`make lock` renews the file"
