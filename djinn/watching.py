"""For packages that look at each op that a thread records: telling an observer, and what it asks of ops and memory."""

from __future__ import annotations

from djinn_client.interception.recording.op_observer import (
    OpObserver,
    fetch_all,
    is_own,
    module_in_words,
    place_of_op,
    run_here,
    unwatched,
    watch_ops,
)
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.memory_views import memory_between, view_of
from djinn_client.interception.tensors.storage import Value
from djinn_core.ir.module_path import ModuleCall
from djinn_core.ir.program import Call, Site, Slot, describe_site
from djinn_core.torch_private import default_tolerances

__all__ = [
    "Call",
    "LazyTensor",
    "ModuleCall",
    "OpObserver",
    "Site",
    "Slot",
    "Value",
    "default_tolerances",
    "describe_site",
    "fetch_all",
    "is_own",
    "memory_between",
    "module_in_words",
    "place_of_op",
    "run_here",
    "unwatched",
    "view_of",
    "watch_ops",
]
