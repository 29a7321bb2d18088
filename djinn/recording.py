"""For interceptors: what a function records, to be recorded again at a stroke."""

from __future__ import annotations

from djinn_core.interception.recording.recorded_call import RecordedCall, is_watched, metadata_of, record_call
from djinn_core.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.interception.tracing import let_dynamo_trace
from djinn_core.torch_tracing import takes_list

__all__ = [
    "LazyTensor",
    "RecordedCall",
    "is_watched",
    "let_dynamo_trace",
    "metadata_of",
    "record_call",
    "takes_list",
]
