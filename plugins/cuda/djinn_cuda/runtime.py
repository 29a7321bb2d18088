"""One opened GPU: copies on a stream of their own, ordered against the ops by events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from djinn.hooks import DeviceRuntime

# Copying into pinned memory and from there to the GPU overlap from the second piece on.
PIECE = 8 << 20  # bytes


def pieces(size: int, step: int = PIECE) -> Iterator[slice]:
    """Slices that cover `size` bytes in order, each of at most `step`."""
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


class CudaRuntime(DeviceRuntime):
    """A GPU, opened for this process. Ops run on torch's current stream, copies on a stream of this object's."""

    def __init__(self, index: int) -> None:
        super().__init__(torch.device("cuda", index))
        torch.cuda.init()
        torch.cuda.set_device(self.device)
        self._copies = torch.cuda.Stream(self.device)

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        """`data` (bytes in host memory) on the GPU. Returns when the bytes are in pinned memory or beyond."""
        ops = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies):
            there = torch.empty_like(data, device=self.device)
            for piece in pieces(data.numel()):
                # torch keeps a pinned block until the copies from it are done, so it may be dropped at once.
                pinned = torch.empty_like(data[piece], pin_memory=True).copy_(data[piece])
                there[piece].copy_(pinned, non_blocking=True)
        ops.wait_stream(self._copies)
        # Its memory belongs to the copy stream: it must not be used again there while ops still read it.
        there.record_stream(ops)
        return there

    def deliver(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in pinned host memory. Waits for the ops before it, not for those issued since."""
        if tensor.device.type == "cpu":
            return tensor
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        here = torch.empty_like(tensor, device="cpu", pin_memory=True)
        done = torch.cuda.Event()
        with torch.cuda.stream(self._copies):
            here.copy_(tensor, non_blocking=True)
            done.record(self._copies)
        done.synchronize()
        return here

    def memory(self) -> Mapping[str, int]:
        """Bytes: `total` and `free` of the GPU, `allocated` to tensors of this process, `reserved` by its allocator."""
        reserved, peak = torch.cuda.memory_reserved(self.device), torch.cuda.max_memory_allocated(self.device)
        return {**super().memory(), "reserved": reserved, "peak": peak}
