"""Compiled templates by digest, and the bindings (slots and inputs) of each template's last run."""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Iterator, Sequence
from typing import Any

import attrs

from djinn_core.errors import ProtocolError
from djinn_core.wire.binding_delta import apply_input_changes, apply_slot_changes, unpack_handles
from djinn_core.wire.messages import Submit, TemplateDecision, Workload
from djinn_core.wire.templates import TemplateCache
from djinn_server.running.arbiter import Candidate, TemplateChoice
from djinn_server.running.drawing import Draws, draws_of
from djinn_server.running.input_aliases import InputAliases, aliases_of
from djinn_server.running.run_request import RunRequest, unpack
from djinn_server.running.template_compiler import CompiledTemplate


class CompiledTemplates:
    """Cache of the compiled templates of this process, by digest.

    A client that reconnects finds its templates compiled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._templates: TemplateCache[CompiledTemplate] = TemplateCache()

    def get(self, digest: bytes) -> CompiledTemplate | None:
        """Return the compiled template with that digest, or None."""
        with self._lock:
            return self._templates.get(digest)

    def put(self, digest: bytes, compiled: CompiledTemplate) -> CompiledTemplate:
        """Cache a template, and return it. If another session has cached the template meanwhile, return the cached one."""
        with self._lock:
            cached = self._templates.get(digest)
            if cached is None:
                self._templates.put(digest, compiled, len(compiled.steps))
            return cached or compiled


@attrs.define
class BoundTemplate:
    """A template that the client may name by its digest, with the bindings (slots and inputs) of its last run.

    Attributes:
        slots, inputs: numbers and handles of the last run.
        choice: the offers of run strategies for the template; None if no strategy may run it.
        digest: digest by which the client names the template.
        joint: the offer that may run the template for several sessions at once; None if there is none.
        runs_ahead: number of leading instructions that may run before the submission arrives, if none of them draws
            random numbers; None before it is computed.
        workload: kind of the client's work, such as decoding; None: unknown.
        seconds: duration of the last run, limited to twice the value before; infinite before the first run.
    """

    template: CompiledTemplate
    slots: list[Any]
    inputs: list[int]
    choice: TemplateChoice | None = None
    digest: bytes = b""
    joint: Candidate | None = None
    runs_ahead: int | None = None
    workload: Workload | None = None
    seconds: float = math.inf
    _aliases: InputAliases | None = None
    _draws: Draws | None = None

    @property
    def draws(self) -> Draws:
        """The random draws of the template, as `draws_of` finds them. Cached."""
        if self._draws is None:
            self._draws = draws_of(self.template)
        return self._draws

    def decisions(self) -> Iterator[TemplateDecision]:
        """Yield how the template runs, and why it does not run in another way."""
        if self.choice is not None:
            yield from self.choice.decisions()
        if self.template.growth_refusal:
            name, ops = self.digest.hex()[:8], self.template.count
            yield TemplateDecision(name, ops, "growing cache", f"not used: {self.template.growth_refusal}")

    def consumed(self, inputs: Sequence[int]) -> list[int]:
        """Return those of the run's input handles whose values the run consumes. They are freed when the run ends."""
        first = len(self.template.constants) + self.template.slots
        return [inputs[place - first] for place in self.template.consumed]

    def input_aliases(self, own: Container[str]) -> InputAliases:
        """Return the aliases of the template's inputs, as `aliases_of` does. Cached. `own`: names of Djinn's own ops."""
        if self._aliases is None:
            self._aliases = aliases_of(self.template, own)
        return self._aliases


def begin(bound: BoundTemplate, slots: Sequence[Any], inputs: Sequence[int]) -> None:
    """Set the bindings (slots and inputs) of a template for its first run.

    Raises:
        ProtocolError: the bindings do not fit the template.
    """
    template = bound.template
    if len(slots) != template.slots:
        raise ProtocolError(f"a submission brings {len(slots)} slots, but its template needs {template.slots}")
    if len(inputs) != template.inputs:
        raise ProtocolError(f"a submission brings {len(inputs)} inputs, but its template needs {template.inputs}")
    bound.slots[:], bound.inputs[:] = slots, inputs


def bind(bound: BoundTemplate, submit: Submit, work: RunRequest) -> None:
    """Update the bindings of a template from a submission, and set `work.inputs` to the inputs.

    Raises:
        ProtocolError: the submission does not fit the template.
    """
    if submit.first is not None:
        begin(bound, submit.first.slots, unpack_handles(submit.first.inputs))
    if submit.slot_changes:
        apply_slot_changes(bound.slots, submit.slot_changes)
    if submit.input_changes:
        apply_input_changes(bound.inputs, submit.input_changes)
    if len(work.outputs) != len(bound.template.outputs):
        raise ProtocolError(
            f"a submission names {len(work.outputs)} outputs, but its template has {len(bound.template.outputs)}"
        )
    work.inputs = bound.inputs


def bind_copy(bound: BoundTemplate | None, submit: Submit) -> tuple[BoundTemplate | None, RunRequest] | None:
    """Return a copy of a template's last bindings with a submission's changes, and the submission's work.

    Return None if the submission brings first bindings instead of changes, is refused or invalid, or names an unknown
    template. `bound`: its template; None if it names an unknown one or none. If it names none, the copy is None, too.
    """
    work = unpack(submit)
    if submit.refused or submit.first is not None or work.unreadable:
        return None
    if bound is None:
        return None if submit.digest else (None, work)
    copy = attrs.evolve(bound, slots=[*bound.slots], inputs=[*bound.inputs])
    try:
        bind(copy, submit, work)
    except Exception:
        return None
    return copy, work
