"""The core names no plugin: what it needs to know of one, the plugin says itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.kinds import EVERY_KIND
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection

ROOT = Path(__file__).resolve().parents[2]
IMPLEMENTATION = ("djinn_core", "djinn_client", "djinn_server")
PACKAGES = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
# Names of transports and devices are those of protocols and of hardware; names of patterns are what profiles speak of. Others may
# be words of the core, too, where a line here says which.
CHOSEN = (
    "cost_models",
    "optimizations",
    "placement_policies",
    "schedulers",
    "compilers",
    "authenticators",
    "assignment_policies",
    "observers",
)
WORDS = {
    ("djinn_core/ir/schedule.py", "dynamic"): "a scheduling strategy",
    ("djinn_core/ir/schedule.py", "parallel"): "a scheduling strategy",
    ("djinn_core/ir/schedule.py", "pipeline"): "a scheduling strategy",
    ("djinn_core/ir/schedule.py", "priority"): "a scheduling strategy",
    ("djinn_core/logs.py", "pipeline"): "a part of the log",
}


def names() -> frozenset[str]:
    """Names of the objects that plugins of the repository register, and that are chosen by name."""
    registry = load_registry(Selection(), builtins=builtin_plugins(), kinds=EVERY_KIND)
    return frozenset(
        name
        for (objects, name), row in registry.owners.items()
        if objects in CHOSEN and row.distribution.startswith("djinn-")
    )


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Text constants of a module, with their lines; docstrings are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(tree):  # parents come before what is inside of them
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr):
            docstrings.add(id(node.body[0].value))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def texts_beside(words: re.Pattern[str]) -> Iterator[tuple[str, int, str]]:
    """Text constants, with their places, of modules of the core that the pattern is found in; the others are not parsed."""
    for path in sorted(path for package in IMPLEMENTATION for path in (ROOT / package).rglob("*.py")):
        if words.search(path.read_text(encoding="utf-8")):
            yield from ((str(path.relative_to(ROOT)), line, text) for line, text in texts(path))


def test_core_names_no_plugin_object() -> None:
    known = names()
    assert {"cost_based", "pipeline", "parallel", "inductor"} <= known
    words = re.compile(rf"""["']({"|".join(map(re.escape, sorted(known)))})["']""")
    named = {(path, text): line for path, line, text in texts_beside(words) if text in known}
    assert {f"{path}:{line}: {text!r}" for (path, text), line in named.items() if (path, text) not in WORDS} == set()
    assert set(WORDS) <= set(named), "a line of WORDS is not needed any more"


def test_core_names_no_plugin_package() -> None:
    either = "|".join(name.replace("_", "[-_]") for name in PACKAGES)
    packages = re.compile(rf"\bdjinn[-_]({either})\b")
    assert [f"{path}:{line}: {text!r}" for path, line, text in texts_beside(packages) if packages.search(text)] == []
