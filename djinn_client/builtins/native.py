"""The native device as a plugin: the built-in interception."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

from djinn_client.hookspecs.interception import Interception
from djinn_client.sink import Sink, Submission
from djinn_core.hookspecs import API_VERSION, hookimpl
from djinn_core.ir.handles import storage_of
from djinn_core.ir.program import Call

djinn_api_version = API_VERSION


class Native(Interception):
    """Implement `Interception` with the C++ device. Its modules are imported in `begin`, when `djinn` is imported."""

    name = "native"

    def begin(self, sink: Sink) -> None:
        """Register the device with PyTorch. Further calls do nothing."""
        from djinn_client.interception.install import install
        from djinn_client.interception.sync import synchronize

        super().begin(sink)
        install()
        self._synchronize = synchronize

    def take(self, thread: int | None = None) -> Sequence[Submission]:
        """Return the recorded submissions of this thread, or of all threads if `thread` is None."""
        from djinn_client.interception.recording.recorder import SyncRequest, current, recorders

        sources = recorders.all() if thread is None else [current()]
        return [recorder.take(SyncRequest()) for recorder in sources]

    def learn(self, call: Call, result: int, stride: tuple[int, ...]) -> None:
        """Predict `stride` for the result number `result` of calls like `call`, because the old prediction was wrong."""
        from djinn_client.interception.dispatch import learn_layout

        learn_layout(call, result, stride)

    def reconsider(self) -> None:
        """Forget cached calls, because facts about the executors have changed."""
        from djinn_client.interception.dispatch import forget_calls
        from djinn_client.interception.ops.custom_operators import keep_offered_whole

        forget_calls()
        keep_offered_whole()

    def forget(self) -> None:
        """Drop the recorded ops and learnt facts of a session that has ended."""
        from djinn_client.interception.dispatch import forget_learnt_calls
        from djinn_client.interception.recording.recorder import recorders

        recorders.drop_everything()
        forget_learnt_calls()

    def live(self, since: int) -> int:
        """Return the number of live values with storage numbers from `since` on. Unreachable cycles do not count."""
        from djinn_client.interception.recording.recorder import recorders
        from djinn_client.interception.tensors.storage import handles_to_free, live_values

        gc.collect()
        freed, meta_only = frozenset(handles_to_free()), recorders.meta_only
        handles = [handle for handle, _ in live_values() if handle not in freed and storage_of(handle) >= since]
        return sum(not meta_only.has(handle, ()) for handle in handles)

    def values(self) -> list[tuple[int, int]]:
        """Return the handles and storage sizes of all values."""
        from djinn_client.interception.tensors.storage import live_values

        return live_values()

    def ops(self) -> tuple[int, int]:
        """Return the numbers of recorded ops and of meta kernel runs."""
        from djinn_client.interception.recording.recorder import recorders
        from djinn_client.interception.shape_inference.inference_cache import inference_cache

        return recorders.count_ops(), inference_cache.inferred

    def synchronize(self) -> None:
        """Send the recorded ops, and wait until the devices have finished."""
        self._synchronize()


@hookimpl
def djinn_register_interception() -> Iterable[Interception]:
    """Return the native device."""
    return [Native()]
