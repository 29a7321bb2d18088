"""Pictures: well-formed whatever modules are called, readable however many layers there are, the same on a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import djinn
import djinn_observability.html
from djinn.planning import PatternMatch, PipelineResult
from djinn.testing import PluginConformance, RendererConformance
from djinn_core.ir.costs import Calibration
from djinn_observability.html.geometry import PlacedBox, place
from djinn_observability.html.layering import lay_out
from djinn_observability.html.page import page
from djinn_observability.html.scene import BOXES, open_boxes, scene
from djinn_observability.html.svg import svg


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_observability.html


class TestSvg(RendererConformance):
    @pytest.fixture
    def renderer(self):
        return djinn_observability.html.SvgRenderer()


class TestPage(RendererConformance):
    @pytest.fixture
    def renderer(self):
        return djinn_observability.html.HtmlRenderer()


SVG = "{http://www.w3.org/2000/svg}"
EVIL = "</script><script>alert(1)</script>&\"'\x00\u2028]]>"


class Layer(nn.Module):
    def __init__(self, width: int, function: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.function = function or nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.function(self.linear(x))


class Tower(nn.Module):
    """A model with a list of layers between two linear layers. The list itself is never called."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def plan_tower(layers: int, *, train: bool = False) -> PipelineResult:
    with torch.device("meta"):
        model, x = Tower([Layer(8) for _ in range(layers)]), torch.zeros(3, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with djinn.capture() as captured, torch.set_grad_enabled(train):
        loss = model(x).sum()
        if train:
            loss.backward()
            optimizer.step()
    return djinn.plan(captured, until="estimate")


def texts_of(picture: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(picture).iter(f"{SVG}text")]


def test_equal_layers_share_one_box() -> None:
    few, many = svg(plan_tower(3)), svg(plan_tower(32))
    assert any("layers.0-31 x32" in words for words in texts_of(many))
    assert len(texts_of(many)) == len(texts_of(few))
    assert abs(len(many) - len(few)) < len(few) / 10


def test_training_step_has_three_coloured_parts() -> None:
    picture = svg(plan_tower(4, train=True))
    words = texts_of(picture)
    assert {"forward", "backward", "optimizer", "training forward", "training backward"} <= set(words)
    assert "layers.3-0 x4 · Layer" in words


def test_pictures_say_whether_speeds_are_assumed() -> None:
    result = plan_tower(2)
    assert "share of the predicted time (assumed speeds)" in texts_of(svg(result))
    devices = [attrs.evolve(device, calibration=Calibration("0")) for device in result.topology.devices]
    measured = attrs.evolve(result, topology=attrs.evolve(result.topology, devices=tuple(devices)))
    assert "share of the predicted time" in texts_of(svg(measured))


def test_names_are_escaped_and_page_is_self_contained() -> None:
    result = plan_tower(2)
    Evil = type(EVIL.replace("\x00", ""), (nn.Linear,), {})
    with torch.device("meta"):
        inner, x = Evil(4, 4), torch.zeros(1, 4)
    model = nn.Sequential()
    model._modules[EVIL.replace(".", "")] = inner
    with djinn.capture() as captured, torch.no_grad():
        model(x)
    result = djinn.plan(captured, until="place")
    match = PatternMatch(EVIL, (0,), 1.0, EVIL)
    result = attrs.evolve(result, profile=attrs.evolve(result.profile, patterns=(match,)))
    picture, document = svg(result), page(result)
    assert any("<script>alert(1)" in words for words in texts_of(picture))
    for text in (picture, document):
        assert "<script>alert" not in text
        assert re.findall(r"(?:src|href)=|url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert document.count("</script>") == 1
    assert "<script>alert" not in captured._repr_svg_()


def boxes_with_outer(placed: PlacedBox) -> Iterator[tuple[PlacedBox, PlacedBox | None]]:
    yield placed, None
    for inner in placed.inner:
        yield inner, placed
        yield from ((one, outer) for one, outer in boxes_with_outer(inner) if outer is not None)


@pytest.mark.parametrize("layers", [1, 32])
def test_boxes_are_nested_without_overlap(layers: int) -> None:
    whole = scene(plan_tower(layers, train=True))
    every = frozenset(id(box) for box in whole)
    for opened in (open_boxes(whole), every, frozenset()):
        placed = place(whole, opened)
        for box, outer in boxes_with_outer(placed):
            if outer is not None:
                assert box.x >= 0
                assert box.y >= 0
                assert box.x + box.width <= outer.width + 0.01
                assert box.y + box.height <= outer.height + 0.01
        for outer, _ in boxes_with_outer(placed):
            for number, one in enumerate(outer.inner):
                for other in outer.inner[number + 1 :]:
                    apart = one.x + one.width <= other.x or other.x + other.width <= one.x
                    assert apart or one.y + one.height <= other.y or other.y + other.height <= one.y
    assert sum(not box.is_open for box, _ in boxes_with_outer(place(whole, open_boxes(whole)))) <= BOXES


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 12).flatmap(lambda n: st.tuples(
    st.just(n), st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] < e[1])),
    st.sets(st.integers(0, n - 1)), st.sets(st.integers(0, n - 1)))))  # fmt: skip
def test_picture_arrows_point_down(case: tuple[int, set[tuple[int, int]], set[int], set[int]]) -> None:
    boxes, edges, entering, leaving = case
    made = lay_out(boxes, edges, entering, leaving)
    row = {cell: number for number, cells in enumerate(made.rows) for cell in cells}
    assert len(row) == sum(map(len, made.rows))
    assert set(range(boxes)) <= row.keys()
    ends = sorted((wire[0], wire[-1]) for wire in made.wires)
    assert ends == sorted([*edges, *((boxes, b) for b in entering), *((b, boxes + 1) for b in leaving)])
    for wire in made.wires:
        assert [row[cell] for cell in wire] == list(range(row[wire[0]], row[wire[-1]] + 1))
        assert all(cell > boxes + 1 for cell in wire[1:-1])


def test_file_suffix_selects_format(tmp_path: Path) -> None:
    with torch.device("meta"):
        layer, x = nn.Linear(2, 2), torch.zeros(1, 2)
    with djinn.capture() as captured:
        layer(x)
    captured.picture(tmp_path / "a.svg")
    captured.picture(str(tmp_path / "a.html"))
    ET.fromstring((tmp_path / "a.svg").read_text())
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(djinn.errors.ConfigurationError, match=r"no renderer writes files that end in \.png"):
        captured.picture(tmp_path / "a.png")
    with pytest.raises(djinn.errors.ConfigurationError, match="create the folder"):
        captured.picture(tmp_path / "nowhere" / "a.svg")


@pytest.mark.skipif(
    shutil.which("node") is None, reason="pages are drawn by JavaScript, and there is no node to run it"
)
def test_page_layout_equals_svg(tmp_path: Path) -> None:
    result = plan_tower(4, train=True)
    script = re.search(r"<script>(.*)\nshow\((.*), document\.body\);\n</script>", page(result), re.DOTALL)
    assert script is not None
    code = (
        f"{script[1]}\nconst scene = {script[2]};\nconst closed = {{...scene, whole: {{...scene.whole, open: false}}}};"
    )
    file = tmp_path / "page.js"
    file.write_text(f"{code}\nconsole.log(JSON.stringify([render(scene), render(closed)]));")
    done = subprocess.run(["node", str(file)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    opened, closed = json.loads(done.stdout)

    def rows(picture: str) -> list[float]:
        lines = [e for e in ET.fromstring(picture).iter(f"{SVG}text") if e.get("font-weight") == "bold"]
        return [float(e.get("y", "")) for e in lines]

    assert len(rows(closed)) == 1
    heights = re.findall(r'translate\([\d.]+,([\d.]+)\)"', svg(result))[2:]
    drawn_by_page = re.findall(r"translate\([\d.]+,([\d.]+)\)", opened)[1:]
    assert [round(float(y), 1) for y in drawn_by_page] == pytest.approx([float(y) for y in heights[1:]], abs=0.11)
