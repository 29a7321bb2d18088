"""`djinn.capture()`: graph capture without execution, and the analyses of the captured graph."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path

import torch
from torch.nn.utils.stateless import _reparametrize_module

from djinn_client.interception.dispatch import forget_calls
from djinn_client.interception.native.install import hide_frames_of
from djinn_client.interception.recording.replay import reissue
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime import client
from djinn_client.runtime.context import context
from djinn_client.runtime.planning import session_planner
from djinn_client.runtime.planning.run_pipeline import NOWHERE, plan_program, with_reasons
from djinn_client.tracebacks import for_users
from djinn_core.errors import ConfigurationError, DjinnError
from djinn_core.ir.graph import Graph
from djinn_core.ir.profile import PatternMatch, WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.ir.result import STAGES, PipelineResult, Stage, without_later_stages
from djinn_core.ir.schedule import ExecutionSchedule, Run
from djinn_profiler.capture import Capture, capturing
from djinn_profiler.explain.rendering import render, renderer_for
from djinn_profiler.explain.text import Explanation
from djinn_profiler.explain.text import explain as describe_result
from djinn_profiler.plans.analysis_cache import AnalysisCache
from djinn_profiler.plans.cached_plans import planned
from djinn_profiler.semantic_metadata import SemanticMetadata
from djinn_profiler.semantics import semantic_metadata

_DEVICE = "remote_accelerator"
hide_frames_of(__name__)
_analysed = AnalysisCache()  # programs given to `plan` and `explain`


class Captured:
    """The program that was recorded inside `capture()`. It is analysed when one of its attributes is read."""

    def __init__(self, capturing: Capture) -> None:
        self._capturing = capturing

    def __repr__(self) -> str:
        """Return a text with the number of ops. It does not analyse the program."""
        return f"<Captured: {len(self.program):,} ops>"

    @property
    def program(self) -> Program:
        """Return the instructions, in program order."""
        return self._capturing.program

    @cached_property
    def graph(self) -> Graph:
        """Return the program as a graph."""
        return Graph(self.program)

    @cached_property
    def profile(self) -> WorkloadProfile:
        """Return the semantic profile of the program."""
        profile = plan(self.graph, until="annotate").profile
        assert profile is not None
        return profile

    @property
    def patterns(self) -> tuple[PatternMatch, ...]:
        """Return the matches of the pattern plugins."""
        return self.profile.patterns

    def picture(self, file: str | os.PathLike[str]) -> None:
        """Draw the program into a file. The file's suffix selects the renderer.

        The package `djinn-observability` renders `.svg` and `.html`, a page with modules that unfold by a click.

        Raises:
            ConfigurationError: no renderer writes files with that suffix, or the folder does not exist.
            PluginError: the renderer failed.
        """
        path, registry = Path(file), client.registry()
        renderer = renderer_for(path, registry)
        path.write_bytes(render(plan(self.graph, until="place"), renderer, registry))

    def _repr_svg_(self) -> str | None:
        registry = client.registry()
        drawing = (renderer for renderer in registry.renderers if renderer.media_type == "image/svg+xml")
        if (renderer := next(drawing, None)) is None:
            return None
        return render(plan(self.graph, until="place"), renderer, registry).decode()

    @cached_property
    def semantic_metadata(self) -> tuple[SemanticMetadata, ...]:
        """Return all facts about each node."""
        costs = plan(self.graph, until="estimate").costs
        return semantic_metadata(self.graph, self.profile, costs, self._capturing.sent.fetched)


@contextmanager
def capture(model: torch.nn.Module | None = None) -> Iterator[Captured]:
    """Context manager that records the ops of this thread inside the block. It needs no server and runs nothing.

    Factories without a device argument create remote tensors inside the block. Recorded ops run when their results
    are needed.

    Args:
        model: a module whose CPU parameters and buffers are copied to the device inside the block. Writes to the
            copies, gradients included, are lost after the block.
    """
    with capturing() as recording, _with_remote_parameters(model):
        captured = context.captures.latest = Captured(recording)
        yield captured
    if port.counts_when_open():  # with a configured server, the first op that is sent shows whether it works
        forget_calls()
    _ = captured.graph.module_names  # read while the modules are alive


def _with_remote_parameters(model: torch.nn.Module | None) -> AbstractContextManager[object]:
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers())) if model is not None else {}
    remote_tensors = {name: _copy_to_device(tensor) for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    return (
        _reparametrize_module(model, remote_tensors, tie_weights=True)
        if model is not None and remote_tensors
        else nullcontext()
    )


def _copy_to_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(_DEVICE).requires_grad_(tensor.requires_grad)


@for_users
def get_graph() -> Graph:
    """Return the graph of this thread's present or last `capture()`.

    Raises:
        DjinnError: this thread has not captured a program.
    """
    latest = context.captures.latest
    if latest is None:
        raise DjinnError("this thread has captured no program: run code inside `with djinn.capture():` first")
    return Graph(latest.program)


@for_users
def plan(program: Program | Graph | Captured, until: Stage = "schedule") -> PipelineResult:
    """Return the results of the planning stages up to `until` for a program on the connected device.

    Without a session, the stages plan for an unknown device. In a session over several executors, the stages from
    `optimize` on plan for all executors, and use the present locations of the inputs. Results are cached by the content
    of programs. Node ids refer to the result's `graph`.

    Raises:
        ConfigurationError: the stage does not exist.
    """
    if until not in STAGES:
        raise ConfigurationError(f"there is no stage {until!r}; the stages are {', '.join(STAGES)}")
    if isinstance(program, Captured):
        program = program.graph
    switched_off = session_planner.switched_off(context, program)
    if STAGES.index(until) >= STAGES.index("optimize"):
        graph = program if isinstance(program, Graph) else Graph(program)
        if (planned_in_session := session_planner.plan_in_session(context, graph)) is not None:
            measured_result = session_planner.with_measured(context, planned_in_session, program)
            return without_later_stages(with_reasons(measured_result, switched_off), until)
    target = (client.registry(), client.settings(), client.device() or NOWHERE)
    result = plan_program(program, *target, until, without=switched_off, make=partial(planned, cache=_analysed))
    return session_planner.with_measured(context, result, program)


@for_users
def explain(
    program: Program | Graph | Captured | PipelineResult,
    until: Stage = "schedule",
    *,
    unfold: bool = False,
    depth: int | None = None,
) -> Explanation:
    """Return a text with each stage's decisions about a program, with reasons, and its modules as a tree.

    Args:
        program: the program.
        until: the last stage to explain.
        unfold: True to list equal layers one by one.
        depth: number of listed module levels. None means all levels.

    Returns:
        The text. Its attribute `described` has the same facts as JSON values.
    """
    result = without_later_stages(program, until) if isinstance(program, PipelineResult) else plan(program, until)
    return describe_result(result, unfold=unfold, depth=depth)


@for_users
def execute(
    schedule: ExecutionSchedule, inputs: Mapping[int, torch.Tensor] | Sequence[torch.Tensor] | None = None
) -> tuple[torch.Tensor, ...]:
    """Run a schedule, and return the remote tensors of `graph.outputs`, in that order.

    Args:
        schedule: result of `djinn.plan` or `Scheduler` for a captured program.
        inputs: tensors for the graph's inputs: by value id, or a list in the order of `graph.inputs`. If an input is
            missing, the input of the capture is used, which must still be alive.

    Raises:
        DjinnError: an input differs in metadata from the captured input, the number of inputs is wrong, or a value id
            is not an input.
    """
    graph = Graph(schedule.program)
    nodes = [
        node for steps in schedule.steps.values() for step in steps if isinstance(step, Run) for node in step.nodes
    ]
    tensors = reissue(schedule.program, sorted(nodes), schedule.replace, _by_value(graph, inputs))
    return tuple(tensors[schedule.replace.get(value, value)] for value in graph.outputs)


def _by_value(
    graph: Graph, inputs: Mapping[int, torch.Tensor] | Sequence[torch.Tensor] | None
) -> Mapping[int, torch.Tensor]:
    if inputs is None:
        return {}
    if isinstance(inputs, Mapping):
        unknown = sorted(inputs.keys() - set(graph.inputs))
        if unknown:
            raise DjinnError(f"the graph has no inputs {unknown}; its inputs are {list(graph.inputs)} (graph.inputs)")
        return inputs
    if len(inputs) != len(graph.inputs):
        raise DjinnError(
            f"{len(inputs)} inputs were given for a graph with {len(graph.inputs)}; give all, in the order of "
            "graph.inputs, or only some as a mapping from value id to tensor"
        )
    return dict(zip(graph.inputs, inputs, strict=True))
