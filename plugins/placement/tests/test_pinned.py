from __future__ import annotations

import attrs
import pytest

from djinn.errors import InvalidStage
from djinn.testing import placement_context, sample_graphs
from djinn_placement.pinned import Pinned


def place_with_pins(pins):
    context = placement_context(sample_graphs()["perceptron"], devices=2)
    return context, Pinned().place(attrs.evolve(context, pins=pins))


def test_pinned_modules_and_weights_share_device():
    context, placement = place_with_pins({"mlp.u*": "1", "mlp": "0"})
    first, second = (d.id for d in context.topology.devices)
    assert [d.device for d in placement.decisions] == [second, first, first]
    weight = context.graph.nodes[0].inputs[1]
    assert placement.values[weight] == second
    assert placement.decisions[0].reason == "the pin 'mlp.u*' matches mlp.up"


def test_unpinned_modules_follow_their_data():
    context, placement = place_with_pins({"mlp.up": context_id(1)})
    assert {d.device for d in placement.decisions} == {context.topology.devices[1].id}


def test_pin_to_unknown_device_lists_devices():
    with pytest.raises(InvalidStage, match=r"'mlp' names the device 'cuda:7', which .* Use one of server/cpu:0"):
        place_with_pins({"mlp": "cuda:7"})


def context_id(index):
    return placement_context(sample_graphs()["perceptron"], devices=2).topology.devices[index].id
