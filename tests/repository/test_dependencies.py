"""Every dependency is explained, and nothing is explained that is none."""

from __future__ import annotations

import re
import tomllib


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


def test_docs_explain_exactly_the_dependencies(root, files):
    needed = {name_of(requirement) for requirement in requirements(root, files)} - {"djinn"}
    makefile = (root / "Makefile").read_text()
    needed |= {name_of(found) for found in re.findall(r"'([a-z0-9-]+)>=", makefile)}
    needed |= {name_of(found) for found in re.findall(r"^WEIGHTS\s*:=\s*(\S+)", makefile, re.MULTILINE)}
    document = (root / "docs" / "dependencies.md").read_text()
    explained = {name.lower() for name in re.findall(r"^\| `([^`]+)` \|", document, re.MULTILINE)}
    assert needed == explained


def test_no_extra_names_an_unpublished_plugin(root):
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not [r for extra in extras.values() for r in extra if name_of(r).startswith("djinn-")]
