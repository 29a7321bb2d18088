"""Renderers of plugins: found by format, file ending and media type; what fails is named, and what is missing can be installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import djinn
from djinn.hooks import Renderer, hookimpl
from djinn.planning import PipelineResult
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import Registry, load_registry
from djinn_core.registry.selection import Selection
from djinn_profiler.explain.rendering import render, renderer_for, renderer_of


class DotsRenderer(Renderer):
    """A renderer of another package."""

    name = "dots"
    suffixes = (".dots",)
    media_type = "text/html"

    def render(self, result: PipelineResult) -> str:
        return "\u00b7" * len(result.graph.nodes)


def registry_of(*renderers: Any) -> Registry:
    class Plugin:
        djinn_api_version = "2.0"

        @hookimpl
        def djinn_register_renderers(self) -> list[Any]:
            return list(renderers)

    selection = Selection(plugins=(Plugin(),) if renderers else ())
    return load_registry(selection, builtins=builtin_plugins(), kinds={"renderers"})


@pytest.fixture
def result() -> PipelineResult:
    with torch.device("meta"):
        layer, x = torch.nn.Linear(2, 2), torch.zeros(1, 2)
    with djinn.capture() as captured, torch.no_grad():
        layer(x)
    return djinn.plan(captured, until="annotate")


def test_renderer_is_found_by_format_and_suffix(result: PipelineResult, tmp_path: Path) -> None:
    registry = registry_of(DotsRenderer())
    for found in (renderer_of("dots", registry), renderer_for(tmp_path / "a.DOTS", registry)):
        assert render(result, found, registry).decode() == "\u00b7" * len(result.graph.nodes)
    with pytest.raises(djinn.errors.ConfigurationError, match="create the folder"):
        renderer_for(tmp_path / "nowhere" / "a.dots", registry)


def test_missing_renderer_names_package(tmp_path: Path) -> None:
    with pytest.raises(
        djinn.errors.ConfigurationError, match=r"end in \.svg \(available: none\)\. .*plugins/observability"
    ):
        renderer_for(tmp_path / "a.svg", registry_of())
    with pytest.raises(
        djinn.errors.ConfigurationError,
        match=r"no format 'svg' \(available: text, json, dots\)\. .*plugins/observability",
    ):
        renderer_of("svg", registry_of(DotsRenderer()))


def test_renderer_error_names_plugin(
    result: PipelineResult, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenRenderer(DotsRenderer):
        name = "broken"
        suffixes = (".broken",)

        def render(self, result: PipelineResult) -> str:
            raise KeyError("ink")

    registry = registry_of(BrokenRenderer(), DotsRenderer())
    with pytest.raises(
        djinn.errors.PluginError, match=r"the renderer 'broken' of plugin 'Plugin' .* raised KeyError: 'ink'"
    ):
        render(result, renderer_of("broken", registry), registry)


def test_renderers_with_same_suffix_conflict() -> None:
    class SecondRenderer(DotsRenderer):
        name = "more"

    plugins = []
    for name, made in (("ant", DotsRenderer()), ("bee", SecondRenderer())):
        members = {"djinn_api_version": "2.0", "djinn_register_renderers": hookimpl(lambda _, made=made: [made])}
        plugins.append(type(name, (), members)())
    with pytest.raises(djinn.errors.PluginError, match=r"the file ending '\.dots' is taken twice: plugin 'ant'"):
        load_registry(Selection(plugins=tuple(plugins)), builtins=builtin_plugins(), kinds={"renderers"})
