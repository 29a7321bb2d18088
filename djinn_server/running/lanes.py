"""Threads of a CPU in which independent submissions of one session run at the same time: its lanes.

Each lane uses as many threads of PyTorch as the executor, so an op computes the same bits in each lane.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Final

import attrs
import torch

from djinn_core.ir.handles import storages_of
from djinn_core.system.limits import processors
from djinn_server.running.bound_templates import BoundTemplate
from djinn_server.running.run_request import RunRequest

MIN_RUN_SECONDS: Final = 1e-3  # duration from which a run is faster in a lane
MIN_MEAN_OP_SECONDS: Final = (
    2e-4  # mean duration of an op from which lanes are faster: threads with shorter ops mostly wait
)


class Lanes:
    """Run independent submissions of the session that has the device.

    Attributes:
        count: number of lanes; 1: submissions run one after another.
    """

    def __init__(self, device: torch.device, count: int | None = None) -> None:
        """`count`: number of lanes. None: one on an accelerator, the processors divided by PyTorch's threads on a CPU."""
        threads = torch.get_num_threads() if device.type == "cpu" else processors()
        self.count = count or max(processors() // threads, 1)
        self._pool = ThreadPoolExecutor(self.count, "djinn-lane", _use_process_threads)

    def pay_for(self, bound: BoundTemplate) -> bool:
        """Return True if the template's ops take long enough for concurrent runs to be faster."""
        return self.count > 1 and bound.seconds >= max(MIN_RUN_SECONDS, MIN_MEAN_OP_SECONDS * bound.template.count)

    def start(self, call: Callable[[], bool]) -> Future[bool]:
        """Run `call` in a lane as soon as a lane is free. Return a future of its result."""
        return self._pool.submit(call)


def _use_process_threads() -> None:
    """Set the number of OpenMP threads of this lane to that of the process. OpenMP stores the number per thread."""
    torch.set_num_threads(torch.get_num_threads())


@attrs.frozen
class Access:
    """Storages that a submission uses, by number.

    Attributes:
        reads: storages of its inputs.
        fetches: storages of values that it sends to the client.
        writes: storages that it writes into, creates or consumes.
    """

    reads: frozenset[int]
    fetches: frozenset[int]
    writes: frozenset[int]

    def may_join(self, earlier: Access) -> bool:
        """Return True if this submission may run concurrently with `earlier`.

        All values and fetched results are then equal to those of a sequential run.
        """
        used = earlier.reads | earlier.fetches | earlier.writes
        return self.reads.isdisjoint(earlier.writes) and self.writes.isdisjoint(used)


def access_of(bound: BoundTemplate | None, work: RunRequest, own_ops: Container[str], grown: Sequence[int]) -> Access:
    """Return the storages that a submission with bindings uses.

    `own_ops`: names of Djinn's own ops. `grown`: positions of inputs that may grow in place.
    """
    fetches = frozenset(storages_of(chain(work.fetch, work.describe)))
    if bound is None:
        return Access(frozenset(), fetches, frozenset())
    written_handles = [work.inputs[position] for position in {*bound.input_aliases(own_ops).written_inputs, *grown}]
    consumed = bound.consumed(work.inputs)  # an earlier submission may fetch them
    return Access(
        frozenset(storages_of(work.inputs)),
        fetches,
        frozenset(storages_of(chain(work.outputs, written_handles, consumed))),
    )
