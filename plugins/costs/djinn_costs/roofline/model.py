"""The cost model `measured_roofline`: predict the time of an op from measured ops or from its memory traffic."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from djinn.hooks import CostModel, Probe
from djinn.planning import (
    Calibration,
    CostEstimate,
    DeviceCapabilities,
    Graph,
    Node,
    Work,
    arguments,
    storage_of,
    work_of,
)
from djinn_core.planning.builtins.memory_traffic import distinct_bytes
from djinn_costs.roofline.elementwise import LARGE, SIZES, SPLIT, PointwiseProbe, sized_probes
from djinn_costs.roofline.fitting import fit_seconds
from djinn_costs.roofline.products import (
    ProductProbe,
    SmallOpsProbe,
    SweepProbe,
    mixed_probes,
    shaped_probes,
    sweep_probes,
)
from djinn_costs.roofline.quick import QUICK
from djinn_costs.roofline.terms import product_terms, recurrent_terms, seconds, size_terms

_VERSION = 2  # version of the parameters of `fit`; other versions are ignored
_LIMIT = 65536
# Ops that are equivalent to a measured op.
_SAME_AS = {
    "_fused_rms_norm": "rms_norm",
    "_to_copy": "clone",
    "batch_norm": "native_batch_norm",
    "bernoulli_": "bernoulli",
    "layer_norm": "native_layer_norm",
    "log_softmax": "_log_softmax",
    "softmax": "_softmax",
    "stack": "cat",
    "zero_": "fill_",
}


class MeasuredRoofline(CostModel):
    """Predict times on measured devices. For other devices, the next cost model is used."""

    name = "measured_roofline"
    tolerates_growth = True

    def __init__(self) -> None:
        self._warm_costs: dict[tuple[str, Work], CostEstimate] = {}
        self._footprint: tuple[Graph, str, frozenset[int], float] | None = None

    def estimate(self, graph: Graph, node: Node, device: DeviceCapabilities) -> CostEstimate | None:
        """Return the cost of a node, or None if the device was not measured."""
        calibration = device.calibration
        parameters = calibration.models.get(self.name) if calibration is not None else None
        if calibration is None or parameters is None or parameters.get("version") != _VERSION:
            return None
        if "pointwise" not in parameters["kinds"]:  # every probe failed
            return None
        work = work_of(graph, node)
        key = (calibration.digest, work)
        warm = self._warm_costs.get(key)
        if warm is None:
            if len(self._warm_costs) >= _LIMIT:
                self._warm_costs.clear()
            probe_seconds = _seconds(parameters, work, _variant(graph, node, work))
            traffic = work.bytes_read, work.bytes_written
            warm = CostEstimate(work.flops, *traffic, probe_seconds, self.name, work.operations, work.workspace)
            self._warm_costs[key] = warm
        if not work.bytes_read:
            return warm
        cold = self._cold_seconds(calibration, graph, node, work)
        return warm if cold <= warm.seconds else attrs.evolve(warm, seconds=cold)

    def probes(self) -> Iterable[Probe]:
        """Yield probes of each family of ops at several sizes, and passes over as much memory as usual programs read."""
        for probes in (sized_probes(), shaped_probes(), sweep_probes(), mixed_probes()):
            yield from (attrs.evolve(probe.probe, quick=probe.probe.name in QUICK) for probe in probes)

    def background_command(self) -> tuple[str, ...]:
        """Return the command of a process that measures a fifth of the probes at low priority."""
        return ("-m", "djinn", "calibrate", "--background")

    def fit(self, seconds: Mapping[str, float]) -> Mapping[str, Any]:
        """Return coefficients for each family of ops, and the memory bandwidth by size of the program."""
        families = _shaped_coefficients([p for p in shaped_probes() if p.probe.name in seconds], seconds)
        sized = [p for p in sized_probes() if p.probe.name in seconds]
        fitted = {
            "version": _VERSION,
            "between": 0.0,
            "families": families,
            "operations": _operation_coefficients(sized, seconds),
            "kinds": _kind_coefficients(sized, seconds),
            "view": _view_seconds({p.operation: seconds[p.probe.name] for p in sized if p.kind == "view"}),
            "bandwidth": _bandwidth([p for p in sweep_probes() if p.probe.name in seconds], seconds, families),
        }
        excess = [
            seconds[m.probe.name] - _unmixed_seconds(fitted, m) for m in mixed_probes() if m.probe.name in seconds
        ]
        return {**fitted, "between": max(0.0, *excess)} if excess else fitted

    def _cold_seconds(self, calibration: Calibration, graph: Graph, node: Node, work: Work) -> float:
        """Return the seconds to read a node's operands from memory, as far as they are inputs of the program.

        These inputs are not cached, because the rest of the program has run since they were last read.
        """
        footprint = self._footprint
        if footprint is None or footprint[0] is not graph or footprint[1] != calibration.digest:
            sizes: dict[int, int] = {}
            for value in graph.inputs:
                storage = storage_of(value)
                sizes[storage] = max(sizes.get(storage, 0), distinct_bytes(graph.meta(value)))
            bandwidth = _interpolate(calibration.models[self.name]["bandwidth"], sum(sizes.values()))
            footprint = self._footprint = (graph, calibration.digest, frozenset(sizes), bandwidth)
        _, _, operand_bytes, bandwidth = footprint
        cold = [v for v in node.inputs if storage_of(v) in operand_bytes]
        if not cold:
            return 0.0
        return min(sum(distinct_bytes(graph.meta(v)) for v in dict.fromkeys(cold)), work.bytes_read) / bandwidth


def _variant(graph: Graph, node: Node, work: Work) -> str:
    """Return the op's name, or the name of its variant if variants differ in speed, such as copies by memory layout."""
    if work.kind == "copy" and work.layout != "contiguous":
        return "clone heads" if work.layout == "permuted" else "clone transposed"
    if work.kind == "reduction" and node.inputs:
        input_shape, output_shape = graph.meta(node.inputs[0]).shape, graph.meta((node.outputs or node.writes)[0]).shape
        return (
            f"{work.operation} outer"
            if len(input_shape) > 1 and output_shape[-1:] == input_shape[-1:]
            else work.operation
        )
    if work.operation == "native_batch_norm" and arguments(node).get("training"):
        return "native_batch_norm training"
    return work.operation


def _seconds(parameters: Mapping[str, Any], work: Work, name: str) -> float:
    """Return the seconds of an op with cached operands; for a fused layer, the sum over its parts."""
    if not work.parts:
        return _warm_seconds(parameters, work, name)
    return sum(_warm_seconds(parameters, part, part.operation) for part in work.parts)


def _warm_seconds(parameters: Mapping[str, Any], work: Work, name: str = "") -> float:
    """Return the seconds of an op with cached operands. `name`: name of the op's variant."""
    family, between = _family(work), float(parameters["between"])
    if family in parameters["families"]:
        families = parameters["families"]
        return between + seconds(families[family], _shaped_terms(family, work.dims, families))
    if work.kind == "view":
        return between + float(parameters["view"][0]) + (work.tensors - 1) * float(parameters["view"][1])
    wide = max(1.0, work.dtype.itemsize / 4)
    bytes_each = math.prod(work.dims) * wide / work.tensors
    return between + work.tensors * seconds(_coefficients(parameters, work, name), size_terms(bytes_each))


def _shaped_terms(family: str, dims: Sequence[int], families: Mapping[str, Sequence[float]]) -> tuple[float, ...]:
    return recurrent_terms(dims, families["product"]) if family == "recurrent" else product_terms(dims)


def _family(work: Work) -> str:
    if len(work.dims) != 4:
        return ""
    if work.kind == "convolution":
        if work.dims[0] > 1:
            return "grouped"
        family = "convolution_backward" if "backward" in work.operation else "convolution"
        return f"{family} 1" if work.kernel == 1 else family
    if work.kind == "recurrent":
        return "recurrent"
    if work.kind == "attention":
        return "attention_backward" if work.operation.endswith("_backward") else "attention"
    return "product"


def _coefficients(parameters: Mapping[str, Any], work: Work, name: str) -> Sequence[float]:
    """Return the coefficients of variant `name`, else of the op, else of an equivalent op, else of the op's kind."""
    operations = parameters["operations"]
    base_name = work.operation.removeprefix("_foreach_")
    for candidate in (name, base_name, _SAME_AS.get(base_name, ""), base_name.rstrip("_")):
        if candidate in operations:
            return operations[candidate]  # type: ignore[no-any-return]
    kinds = parameters["kinds"]
    return kinds.get(work.kind) or kinds["pointwise"]  # type: ignore[no-any-return]


def _interpolate(points: Sequence[Sequence[float]], at: float) -> float:
    """Interpolate linearly between points on logarithmic scales."""
    x, y = np.log([p[0] for p in points]), np.log([p[1] for p in points])
    return float(np.exp(np.interp(math.log(max(at, 1.0)), x, y)))


# --- fitting ----------------------------------------------------------------------------------------------------


def _shaped_coefficients(probes: Sequence[ProductProbe], probe_seconds: Mapping[str, float]) -> dict[str, list[float]]:
    by_family: dict[str, list[ProductProbe]] = defaultdict(list)
    for probe in probes:
        by_family[probe.family].append(probe)
    coefficients: dict[str, list[float]] = {}
    for family, members in by_family.items():
        terms = np.array([_shaped_terms(family, p.dims, coefficients) for p in members])
        times = np.array([probe_seconds[p.probe.name] for p in members])
        if family == "attention_backward":  # the timed backward probe includes a forward pass
            times = np.maximum(times - terms @ np.array(coefficients["attention"]), times / 4)
        coefficients[family] = fit_seconds(terms, times).tolist()
    return coefficients


def _unmixed_seconds(parameters: Mapping[str, Any], mixed: SmallOpsProbe) -> float:
    """Return the predicted time per op of a probe of mixed small ops, as if each op ran alone."""
    works = [Work(name, kind, 0.0, 0.0, 0, 0, dims, torch.float32) for name, kind, dims in mixed.ops]
    return sum(_warm_seconds(parameters, work) for work in works) / len(works)


def _operation_coefficients(
    probes: Sequence[PointwiseProbe], probe_seconds: Mapping[str, float]
) -> dict[str, list[float]]:
    by_operation: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for probe in probes:
        by_operation[probe.operation].append((probe.elements, probe_seconds[probe.probe.name]))
    paging_seconds = _paging({o: p for o, p in by_operation.items() if not o.endswith("_")})
    return {
        operation: _fit_sizes(_extend_to_large(operation, points, paging_seconds))
        for operation, points in by_operation.items()
        if len(points) > 1
    }


def _paging(by_operation: Mapping[str, list[tuple[int, float]]]) -> float:
    """Return the seconds by which paging prolongs an op at size `LARGE`, as a median over ops.

    The time without paging is extrapolated from the next smaller size.
    """
    excess = [
        times[LARGE] - times[SIZES[-1]] * LARGE / SIZES[-1]
        for times in map(dict, by_operation.values())
        if {LARGE, SIZES[-1]} <= set(times)
    ]
    return max(0.0, float(np.median(excess))) if excess else 0.0


def _extend_to_large(operation: str, points: list[tuple[int, float]], paging_seconds: float) -> list[tuple[int, float]]:
    """Return the points. Unless `LARGE` was measured, add a point for it, at the rate of the largest measured size.

    The added time includes `paging_seconds` if the op allocates memory.
    """
    largest, probe_seconds = max(points)
    allocation = 0.0 if operation.endswith("_") else paging_seconds
    return points if largest >= LARGE else [*points, (LARGE, probe_seconds * LARGE / largest + allocation)]


def _view_seconds(probe_seconds: Mapping[str, float]) -> list[float]:
    """Return the seconds of an op that returns one view, and of each further view that one call returns (`split`)."""
    first_view = float(np.median([t for name, t in probe_seconds.items() if name != "split"] or [0.0]))
    return [first_view, max(0.0, probe_seconds.get("split", first_view) - first_view) / (SPLIT - 1)]


def _kind_coefficients(probes: Sequence[PointwiseProbe], probe_seconds: Mapping[str, float]) -> dict[str, list[float]]:
    """Return coefficients for unmeasured ops: for each kind, the median over its measured ops."""
    by_size: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for probe in probes:
        by_size[probe.kind][probe.elements].append(probe_seconds[probe.probe.name])
    return {
        kind: _fit_sizes([(size, float(np.median(times))) for size, times in sizes.items() if size < LARGE])
        for kind, sizes in by_size.items()
    }


def _fit_sizes(points: Sequence[tuple[int, float]]) -> list[float]:
    terms = np.array([size_terms(size) for size, _ in points])
    fitted: list[float] = fit_seconds(terms, np.array([probe_seconds for _, probe_seconds in points])).tolist()
    return fitted


def _bandwidth(
    probes: Sequence[SweepProbe], probe_seconds: Mapping[str, float], families: Mapping[str, Sequence[float]]
) -> list[list[float]]:
    """Return the memory bandwidth in bytes per second, by bytes that a program reads. It never rises with the size."""
    points: list[list[float]] = []
    for probe in probes:
        started = families["product"][0] * probe.count
        rate = probe.footprint / max(probe_seconds[probe.probe.name] - started, probe_seconds[probe.probe.name] / 4)
        points.append([float(probe.footprint), min(rate, points[-1][1] if points else rate)])
    return points
