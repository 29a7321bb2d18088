"""The roofline model: fitted parameters, predictions that grow with the work, and unmeasured devices."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djinn.planning import Calibration, DeviceCapabilities, work_of
from djinn.testing import ProgramBuilder
from djinn_costs.roofline.elementwise import sized_probes
from djinn_costs.roofline.fitting import fit_seconds, non_negative
from djinn_costs.roofline.model import MeasuredRoofline
from djinn_costs.roofline.products import mixed_probes, shaped_probes, sweep_probes
from djinn_costs.roofline.terms import product_terms

START, FLOP, ELEMENT, BANDWIDTH = 3e-6, 1e-11, 2e-10, 1e10


def synthetic_seconds():
    """Return the times of a simulated device with constant rates."""
    times = {p.probe.name: START + 2 * FLOP * math.prod(p.dims) for p in shaped_probes()}
    for p in shaped_probes():
        if p.family == "attention_backward":
            times[p.probe.name] *= 3
    times |= {p.probe.name: START + ELEMENT * p.elements for p in sized_probes()}
    times |= {p.probe.name: p.footprint / BANDWIDTH + START * p.count for p in sweep_probes()}
    return times | {m.probe.name: START for m in mixed_probes()}


def measured_device():
    model = MeasuredRoofline()
    calibration = Calibration("synthetic", models={model.name: model.fit(synthetic_seconds())})
    return DeviceCapabilities("server/cpu:0", "cpu", calibration=calibration)


DEVICE = measured_device()


def predict_seconds(builder, device=DEVICE):
    graph, model = builder.graph(), MeasuredRoofline()
    return [model.estimate(graph, node, device).seconds for node in graph.nodes]


def product(rows, contracted, columns):
    builder = ProgramBuilder()
    # The program makes both operands, so that their bytes are in the cache.
    x = builder.op("aten::empty.memory_format", shape=(rows, contracted))
    w = builder.op("aten::empty.memory_format", shape=(contracted, columns))
    builder.op("aten::mm", x, w, shape=(rows, columns))
    return predict_seconds(builder)[-1]


def test_probe_names_are_unique():
    model = MeasuredRoofline()
    assert list(model.probes())
    names = [probe.name for probe in model.probes()]
    assert len(names) == len(set(names))


def test_unmeasured_devices_are_left_to_other_models():
    builder = ProgramBuilder()
    builder.op("aten::tanh", builder.input(3, 3), shape=(3, 3))
    graph, model = builder.graph(), MeasuredRoofline()
    other = attrs.evolve(DEVICE, calibration=Calibration("old", models={model.name: {"version": 0}}))
    failed = attrs.evolve(DEVICE, calibration=Calibration("failed", models={model.name: model.fit({})}))
    for device in (DeviceCapabilities("server/cpu:0", "cpu"), other, failed):
        assert model.estimate(graph, graph.nodes[0], device) is None


@settings(deadline=None, derandomize=True, max_examples=30)
@given(*[st.integers(1, 2000)] * 3)
def test_fit_predicts_unmeasured_products(rows, contracted, columns):
    expected = START + 2 * FLOP * rows * contracted * columns
    assert product(rows, contracted, columns) == pytest.approx(expected, rel=0.05)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(1, 1 << 23))
def test_fit_predicts_unmeasured_elementwise_ops(elements):
    builder = ProgramBuilder()
    x = builder.op("aten::empty.memory_format", shape=(elements,))
    builder.op("aten::tanh", x, shape=(elements,))
    builder.op("aten::igamma", x, x, shape=(elements,))  # not measured; predicted as other ops of its kind
    for seconds in predict_seconds(builder)[1:]:
        assert seconds == pytest.approx(START + ELEMENT * elements, rel=0.1)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.tuples(*[st.integers(1, 600)] * 3), st.tuples(*[st.integers(0, 600)] * 3))
def test_more_work_never_takes_less_time(sizes, more):
    assert product(*map(sum, zip(sizes, more, strict=True))) >= product(*sizes)


def test_cold_weights_are_memory_bound():
    builder = ProgramBuilder()
    x, w = builder.input(1, 4096), builder.input(4096, 4096)
    builder.op("aten::mm", x, w, shape=(1, 4096))
    assert predict_seconds(builder) == pytest.approx([4096 * 4096 * 4 / BANDWIDTH], rel=0.1)


def test_fit_is_robust_to_outliers():
    rng = np.random.default_rng(0)
    dims = rng.integers(1, 1000, (60, 3))
    terms = np.array([product_terms((1, *row)) for row in dims])
    true = np.array([3e-6, 0.0, 0.0, 2e-11, 1e-10, 5e-11, 0.0])
    times = terms @ true * np.exp(rng.normal(0, 0.02, 60))
    times[::12] *= 5
    assert np.median(np.abs(np.log(terms @ fit_seconds(terms, times) / (terms @ true)))) < 0.03


def test_ops_that_take_no_time_are_fitted():
    terms = np.array([[1.0, size] for size in (64.0, 4096.0, 262144.0)])
    assert (terms @ fit_seconds(terms, np.zeros(3)) < 1e-8).all()


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.integers(0, 10_000), st.booleans())
def test_non_negative_least_squares_meets_kkt_conditions(seed, superfluous):
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(12, 5)), rng.normal(size=12)
    if superfluous:  # the third term correlates most, but adds nothing to the first two
        sums, noise = matrix[:, 0] + matrix[:, 1], target / 4
        matrix[:, 2], target = sums + noise, sums - noise
    x = non_negative(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert (gradient < 1e-6).all()  # larger values would not reduce the error
    assert np.abs(gradient[x > 1e-9]).max(initial=0.0) < 1e-6


def test_every_kind_of_work_has_predicted_seconds():
    builder = ProgramBuilder()
    x = builder.input(8, 16)
    builder.op("aten::cumsum", x, shape=(8, 16))
    builder.op("aten::igamma", x, x, shape=(8, 16))
    builder.op("aten::_unheard_of", x, shape=(8, 16))
    graph = builder.graph()
    assert [work_of(graph, node).kind for node in graph.nodes] == ["scan", "pointwise", "other"]
    assert all(seconds > 0 for seconds in predict_seconds(builder))
