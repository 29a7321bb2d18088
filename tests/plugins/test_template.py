"""The template, for every kind: rendered elsewhere, installed with pip, discovered, listed, used and tested.

Beside the sound plugins stand a broken one, one for another API version and one whose name is taken.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from long_forms import long_or

import djinn
from djinn_core.cli.plugins import render
from djinn_core.errors import ConfigurationError
from djinn_core.registry.kinds import KINDS

USE = """
import torch
from djinn.testing import ProgramBuilder, topology
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.planning.pipeline import plan
from djinn_core.planning.request import Request
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection

builder = ProgramBuilder()
product = builder.op("aten::mm", builder.input(2, 3), builder.input(3, 4), shape=(2, 4))
again = builder.op("aten::relu", builder.op("aten::relu", product, shape=(2, 4)), shape=(2, 4))
builder.op("aten::neg", again, shape=(2, 4))
builder.drop(*(value for value in builder.metas if value != max(builder.metas)))
registry = load_registry(Selection(), builtins=builtin_plugins())
request = Request(topology(2), placement_policy="new_placement_policies", scheduler="new_schedulers")
made = plan(builder.graph(), registry, request)
print(made.profile.pattern_counts())
print(made.costs.by_device["server/cpu:0"][0].model)
print([result.optimization for result in made.plan.results if result.applied])
print(made.placement.policy, made.schedule.scheduler)
"""


# Builds a wheel of each folder that it is given, as pip does: `build_wheel` is called in the folder.
QUIET = "ignore::pytest.PytestAssertRewriteWarning"  # a fork has modules of plugins of pytest imported already

BUILD = """
import os, sys
from hatchling.build import build_wheel
wheels, *folders = sys.argv[1:]
for folder in folders:
    os.chdir(folder)
    build_wheel(wheels)
"""


@attrs.frozen
class Scratch:
    """A folder like `site-packages` in addition to the real ones, and a folder with the sources of its packages."""

    python: Any
    environment: dict[str, str]
    site: Path
    sources: Path

    def run(self, *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the scratch folder, outside of any checkout."""
        paths = os.pathsep.join(filter(None, [str(self.site), os.environ.get("PYTHONPATH")]))
        shown = {"NO_COLOR": "1", "COLUMNS": "200", "PYTHONPATH": paths}
        return self.python.run(*arguments, cwd=self.sources, env=self.environment | shown | environ)

    def djinn(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run the command `djinn` in the scratch folder."""
        return self.run("-m", "djinn_core.cli", *arguments, **environ)


@pytest.fixture(scope="module")
def scratch(python: Any, plain_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    root = tmp_path_factory.mktemp("scratch")
    scratch = Scratch(python, plain_environment, root / "site", root / "sources")
    scratch.sources.mkdir()
    folders = [render(f"new-{kind.name}", kind.name, scratch.sources) for kind in KINDS]
    folders += [_render_broken(scratch, *case) for case in SPOILT]
    built = scratch.run("-c", BUILD, root / "wheels", *folders)
    assert built.returncode == 0, built.stderr
    # One from its folder, as people do it; pip begins two interpreters for each, so the others are built at once.
    first = folders[0].name.replace("-", "_")
    wheels = [path for path in (root / "wheels").glob("*.whl") if not path.name.startswith(f"{first}-")]
    assert len(wheels) == len(folders) - 1
    _pip_install(scratch.site, [folders[0], *wheels])
    return scratch


@pytest.fixture(scope="module")
def rows(scratch: Scratch) -> list[dict[str, Any]]:
    """Return the rows of `djinn plugins --json` for the plugins that the tests installed."""
    done = scratch.djinn("plugins", "--json")
    assert done.returncode == 0, done.stderr
    listing: list[dict[str, Any]] = json.loads(done.stdout)
    own = next(row for row in listing if row["name"] == "cpu")
    assert (own["kind"], own["distribution"], own["status"]) == ("devices", "djinn", "active")
    return [row for row in listing if row["distribution"].startswith(("djinn-new", "strange"))]


# Name, what to change in djinn_<name>/__init__.py and what to put there.
SPOILT = [
    ("new-raising", 'djinn_api_version = "2.0"', "raise RuntimeError('no wings')"),
    ("new-old", 'djinn_api_version = "2.0"', "djinn_api_version = '1.0'"),
    ("strange", 'name = "strange"', 'name = "elsewhere"'),
]


def _render_broken(scratch: Scratch, name: str, old: str, new: str) -> Path:
    folder = render(name, "patterns", scratch.sources)
    module = folder / f"djinn_{name.replace('-', '_')}" / "__init__.py"
    assert old in module.read_text()
    module.write_text(module.read_text().replace(old, new))
    if name == "strange":  # another distribution that offers a plugin called `new_patterns`
        project = folder / "pyproject.toml"
        renamed = project.read_text().replace('strange = "', 'new_patterns = "').replace("djinn-strange", "strange")
        project.write_text(renamed)
    return folder


def _pip_install(site: Path, packages: Sequence[Path]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--target", site, "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_template_plugins_are_listed_by_kind(rows: list[dict[str, Any]]) -> None:
    active = {row["name"]: row for row in rows if row["status"] == "active"}
    assert {name: row["kind"] for name, row in active.items()} == {f"new_{kind.name}": kind.name for kind in KINDS}
    for name, row in active.items():
        assert row == {
            "name": name,
            "kind": row["kind"],
            "distribution": f"djinn-{name.replace('_', '-')}",
            "version": "0.1.0",
            "status": "active",
            "error": None,
            "processes": [process for kind in KINDS if kind.name == row["kind"] for process in kind.processes],
        }


def test_unusable_plugins_give_reason(rows: list[dict[str, Any]]) -> None:
    failed = {row["distribution"]: row["error"] for row in rows if row["status"] == "failed"}
    assert set(failed) == {"djinn-new-raising", "djinn-new-old", "strange"}
    assert "importing it raised RuntimeError: no wings" in failed["djinn-new-raising"]
    assert "plugin API version 1.0, and this Djinn has version 2.0" in failed["djinn-new-old"]
    assert "(djinn-new-patterns 0.1.0) has it" in failed["strange"]
    assert "(strange 0.1.0) is refused" in failed["strange"]


def test_template_plugins_are_used(scratch: Scratch) -> None:
    done = scratch.run("-c", USE)
    assert done.returncode == 0, done.stderr
    recognised, model, optimizations, chosen = done.stdout.splitlines()
    assert "'new_patterns': 1" in recognised
    assert model == "new_cost_models"
    assert "new_optimizations" in optimizations
    assert chosen == "new_placement_policies new_schedulers"
    assert done.stderr.count("a plugin cannot be used") == 3


def test_environment_selects_plugins(scratch: Scratch) -> None:
    environ = {
        "DJINN_PLUGINS": "new_cost_models,new_devices",
        "DJINN_DISABLE": "new_devices",
        "DJINN_TRACE_PLUGINS": "1",
    }
    done = scratch.djinn("plugins", **environ)
    assert done.returncode == 0, done.stderr
    statuses = {cells[0]: cells[-1] for line in done.stdout.splitlines() if (cells := _cells(line))}
    chosen = {name: status for name, status in statuses.items() if name.startswith("new_") and status != "unselected"}
    assert chosen == {"new_cost_models": "active", "new_devices": "disabled"}
    assert "djinn_register_cost_models" in done.stderr


def _cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_template_plugins_pass_their_tests(scratch: Scratch) -> None:
    folders = [scratch.sources / f"djinn-new-{kind.name.replace('_', '-')}" for kind in KINDS]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-W",
        "error",
        "-W",
        QUIET,
        "-p",
        "no:asyncio",
    ]
    # The transports and engines that are in use show these at length.
    shown = ("large_bodies", "close_cancels", "calls_in_any_order", "it_drains", "cannot_start", "takes_the_place")
    options += long_or(["-k", " and ".join(f"not {name}" for name in shown)], [])
    done = scratch.run("-m", "pytest", *options, *folders)
    assert done.returncode == 0, done.stdout[-4000:]


def test_guide_names_packages_that_template_tests_need(tmp_path: Path) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "plugins.md").read_text()
    (sentence,) = re.findall(r"The tests of patterns [^.]*\.", guide)
    needed = set()
    for kind in KINDS:
        for path in render(f"new-{kind.name}", kind.name, tmp_path).rglob("*.py"):
            for name in {*re.findall(r"\bdjinn\.(\w+)", path.read_text())} & {*djinn.__all__}:
                package = getattr(djinn, name).__module__.partition(".")[0]
                needed |= (
                    {(kind.name, package)} if package.startswith("djinn_") and package != "djinn_client" else set()
                )
    assert needed
    for kind_name, package in needed:
        assert kind_name in sentence, (kind_name, package)
        assert f"`{package.replace('_', '-')}`" in sentence, (kind_name, package)


def test_invalid_plugin_names_are_refused(tmp_path: Path) -> None:
    for name in ("", "1st", "Big", "a b", "a--b", "../x"):
        with pytest.raises(ConfigurationError, match="cannot name a plugin"):
            render(name, "patterns", tmp_path)
    render("twice", "patterns", tmp_path)
    with pytest.raises(ConfigurationError, match="exists already"):
        render("twice", "patterns", tmp_path)
