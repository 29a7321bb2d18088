"""Cache of a session's templates by digest, with the bindings of their last runs."""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Sequence
from typing import Any

import attrs

from djinn_core.errors import ProtocolError
from djinn_core.wire.binding_delta import apply_input_changes, apply_slot_changes, unpack_handles
from djinn_core.wire.messages import Submit, Workload
from djinn_core.wire.templates import TemplateCache
from djinn_server.running.arbiter import Candidate, TemplateChoice
from djinn_server.running.drawing import Draws, draws_of
from djinn_server.running.input_aliases import InputAliases, aliases_of
from djinn_server.running.run_request import RunRequest, unpack
from djinn_server.running.template_compiler import CompiledTemplate


class CompiledTemplates:
    """Compiled templates of this process by digest: a reconnecting client finds its templates compiled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: TemplateCache[CompiledTemplate] = TemplateCache()

    def get(self, digest: bytes) -> CompiledTemplate | None:
        """Return the compiled template of that digest; None if there is none."""
        with self._lock:
            return self._kept.get(digest)

    def keep(self, digest: bytes, compiled: CompiledTemplate) -> CompiledTemplate:
        """Store a template under its digest. Return the template to use: another session's if it was stored first."""
        with self._lock:
            found = self._kept.get(digest)
            if found is None:
                self._kept.put(digest, compiled, len(compiled.steps))
            return found or compiled


@attrs.define
class BoundTemplate:
    """A template that the client may name by its digest, and the bindings of its last run.

    `choice`: its record on the device, if a strategy may run it. `joint`: the candidate that may run it for several sessions at once.
    `runs_ahead`: number of leading instructions that may run ahead (except random draws); None: not known
    yet. `workload`: its workload, if known from its client. `seconds`: durations of its last runs.
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
        """Result of `draws_of`, cached."""
        if self._draws is None:
            self._draws = draws_of(self.template)
        return self._draws

    def consumed(self, inputs: Sequence[int]) -> list[int]:
        """Return those of the inputs that a run consumes."""
        first = len(self.template.constants) + self.template.slots
        return [inputs[place - first] for place in self.template.consumed]

    def input_aliases(self, own: Container[str]) -> InputAliases:
        """Result of `aliases_of`, cached."""
        if self._aliases is None:
            self._aliases = aliases_of(self.template, own)
        return self._aliases


def begin(known: BoundTemplate, slots: Sequence[Any], inputs: Sequence[int]) -> None:
    """Bind a template for its first run.

    Raises:
        ProtocolError: the bindings do not fit the template.
    """
    template = known.template
    if len(slots) != template.slots:
        raise ProtocolError(f"a submission brings {len(slots)} slots where {template.slots} are needed")
    if len(inputs) != template.inputs:
        raise ProtocolError(f"a submission brings {len(inputs)} inputs where {template.inputs} are needed")
    known.slots[:], known.inputs[:] = slots, inputs


def bind(known: BoundTemplate, submit: Submit, work: RunRequest) -> None:
    """Bring slots and inputs up to date, and check that the submission fits its template.

    Raises:
        ProtocolError: the submission does not fit.
    """
    if submit.first is not None:
        begin(known, submit.first.slots, unpack_handles(submit.first.inputs))
    if submit.slot_changes:
        apply_slot_changes(known.slots, submit.slot_changes)
    if submit.input_changes:
        apply_input_changes(known.inputs, submit.input_changes)
    if len(work.outputs) != len(known.template.outputs):
        raise ProtocolError("a submission's outputs do not match its template")
    work.inputs = known.inputs


def bind_copy(known: BoundTemplate | None, submit: Submit) -> tuple[BoundTemplate | None, RunRequest] | None:
    """Bind a submission that only changes the last bindings to a copy of them. Return None if it has more, or does not fit.

    `known`: its template; None if it has none or the template is unknown.
    """
    work = unpack(submit)
    if submit.refused or submit.first is not None or work.unreadable:
        return None
    if known is None:
        return None if submit.digest else (None, work)
    copy = attrs.evolve(known, slots=[*known.slots], inputs=[*known.inputs])
    try:
        bind(copy, submit, work)
    except Exception:
        return None
    return copy, work
