"""For integrations: what a function records, to be recorded again at a stroke; values that come later; random state.

For substitutions: calling again what a node called; groups of what is computed.
"""

from __future__ import annotations

from djinn_client.interception.async_fetch import Pending, fetch_later, round_trip_seconds
from djinn_client.interception.device.random_state import keep_state as keep_random_state
from djinn_client.interception.device.random_state import set_state as restore_random_state
from djinn_client.interception.recording.groups import group
from djinn_client.interception.recording.recorded_call import RecordedCall, is_watched, metadata_of, record_call
from djinn_client.interception.recording.replay_node import call_again
from djinn_client.interception.tensors.fetched_calls import call_when_fetched
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tracing import let_dynamo_trace
from djinn_client.torch_tracing import takes_list

__all__ = [
    "LazyTensor",
    "Pending",
    "RecordedCall",
    "call_again",
    "call_when_fetched",
    "fetch_later",
    "group",
    "is_watched",
    "keep_random_state",
    "let_dynamo_trace",
    "metadata_of",
    "record_call",
    "restore_random_state",
    "round_trip_seconds",
    "takes_list",
]
