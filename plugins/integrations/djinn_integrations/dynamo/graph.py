"""A graph of Dynamo with its recordings."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import torch

from djinn_client.interception.native import calls
from djinn_client.interception.native.library import ops
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tap import taps
from djinn_client.runtime.plugins import is_disabled
from djinn_integrations.dynamo.recorded_call import RecordedCall, record_call
from djinn_integrations.dynamo.switch import recording

KEPT: Final = 64  # recordings per graph, which differ in sizes or in shared memory


class RecordedGraph:
    """A function that runs a graph. It appends the recording of a call with equal metadata, or else runs op by op."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        self._run = graph_module.forward
        self._calls: OrderedDict[object, RecordedCall | None] = OrderedDict()

    def __call__(self, *inputs: Any) -> Any:
        """Return the outputs of the graph."""
        if not recording.on or taps.recorded or is_disabled("dynamo"):
            return self._run(*inputs)
        tensors = [i for i in inputs if isinstance(i, torch.Tensor)]
        others = () if len(tensors) == len(inputs) else _non_tensors(inputs)
        metadata = ops.graph_key(tensors)
        if not metadata:
            return self._run(*inputs)
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        key = (*metadata, tuple((place, type(i), _key_of(i)) for place, i in others), modes, _era())
        if key not in self._calls:
            return self._record(key, tensors, others)
        self._calls.move_to_end(key)
        call = self._calls[key]
        return self._run(*inputs) if call is None else call.record(tensors)

    def _record(self, key: object, tensors: list[torch.Tensor], other_inputs: Any) -> Any:
        def run(*tensor_inputs: torch.Tensor) -> Any:
            inputs: list[Any] = list(tensor_inputs)
            for place, other in other_inputs:
                inputs.insert(place, other)
            return self._run(*inputs)

        outputs, self._calls[key] = record_call(run, tensors)
        while len(self._calls) > KEPT:
            self._calls.popitem(last=False)
        return outputs


def _era() -> tuple[int, int]:
    """Return the number of ended sessions, and the generation of C++ call numbers. A change makes recordings invalid.

    A recording's constants belong to one session, and its call numbers to one generation.
    """
    return port.sessions_ended, calls.generation


def _non_tensors(inputs: tuple[Any, ...]) -> list[tuple[int, Any]]:
    return [(place, i) for place, i in enumerate(inputs) if not isinstance(i, torch.Tensor)]


def _key_of(argument: Any) -> Any:
    """Return the cache key of an argument. Keys of 0.0 and -0.0 differ, and the key of a nan equals itself."""
    return repr(argument) if isinstance(argument, (float, complex)) else argument
