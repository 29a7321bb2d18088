"""Templates that an executor has cached, with their last bindings, so that only differences are sent."""

from __future__ import annotations

from collections.abc import Sequence

from djinn_core.ir.program import Program
from djinn_core.runtime.sending.binding import Bound, open_claims
from djinn_core.runtime.sending.template import Prepared
from djinn_core.runtime.stats import Stats
from djinn_core.wire.bindings import changed_slots, pack_handles, rebind
from djinn_core.wire.messages import Submit
from djinn_core.wire.templates import TemplateCache


class KnownTemplates:
    """The templates that were sent to one executor; it drops the same ones at the same time."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._bound: TemplateCache[Bound] = TemplateCache()

    def forget(self, prepared: Prepared) -> None:
        """Forget the last bindings of a template: it is sent anew."""
        self._bound.drop(prepared.digest)

    def run_message(
        self, submit: Submit, prepared: Prepared, bound: Bound, values: Sequence[int], program: Program
    ) -> Submit:
        """`submit`, with the template to run."""
        before = self._bound.get(prepared.digest)
        self._bound.put(prepared.digest, bound, len(prepared.template.code))
        if before is None:
            self._stats.templates_sent += 1
        else:
            self._stats.templates_reused += 1
        return Submit(
            submit.sequence,
            fetch=submit.fetch,
            free=submit.free,
            digest=prepared.digest,
            outputs=pack_handles([values[i] for i in prepared.outputs]),
            changed=() if before is None else changed_slots(before.slots, bound.slots),
            rebound=() if before is None else rebind(before.inputs, bound.inputs),
            first=bound.as_first() if before is None else None,
            template=prepared.template if before is None else None,
            describe=submit.describe,
            claims=open_claims(prepared, program) if prepared.claims else (),
            synchronize=submit.synchronize,
        )
