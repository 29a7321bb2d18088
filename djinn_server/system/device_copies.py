"""Copies between the host and an accelerator, through page-locked memory, with separate streams for each direction."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import torch

BLOCK: Final = 4 << 20  # bytes of a page-locked block
BLOCKS: Final = 15  # so that all blocks take less than 64 MiB: half of them are filled while the other half is copied
LENT: Final = BLOCKS // 2  # maximum number of blocks that receive network data; the others are for copies
# Up to this size, downloads use the compute stream, because a change of streams takes longer than the copy.
SMALL: Final = 64 << 10
_PENDING: Final = 4  # maximum number of blocks in use by one download


class CopyWaits:
    """Track threads that wait for copies, and when the longest wait began."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # start of each wait, by thread

    def until(self, event: Any) -> None:
        """Wait until the device reaches an event."""
        thread = threading.get_ident()
        self._since[thread] = time.monotonic()
        try:
            event.synchronize()
        finally:
            del self._since[thread]

    def since(self) -> float:
        """Return the time at which the longest wait began (`time.monotonic`), or infinity if no thread waits."""
        return min(list(self._since.values()), default=math.inf)


@attrs.define(eq=False)
class LentBlock:
    """A block that receives network data.

    `event`: as in `PinnedRing.give`. `failed`: True if a copy from the block failed.
    """

    block: torch.Tensor
    event: Any = None
    failed: bool = False


class PinnedRing:
    """Page-locked blocks. They are allocated on demand, and reused in the order in which they were returned.

    Thread-safe. A caller with a block must not wait for another block, so that one thread can always continue.
    """

    def __init__(
        self, allocate: Callable[[], torch.Tensor], count: int = BLOCKS, waits: CopyWaits | None = None
    ) -> None:
        """`allocate`: creates a block. `count`: limit of blocks. `waits`: tracks waits for copies."""
        self._allocate, self._unallocated = allocate, count
        self._waits = waits or CopyWaits()
        self._idle: deque[tuple[torch.Tensor, Any]] = deque()  # blocks, with the events of their last copies
        self._lent: dict[int, LentBlock] = {}  # by memory address
        # Reentrant: any thread may free the last view of a lent block at any time.
        self._changed = threading.Condition()

    def take(self) -> torch.Tensor:
        """Return a block that no copy uses. Wait for such a block if necessary."""
        with self._changed:
            while (block_and_event := self._next()) is None:
                self._changed.wait()
        return self._after_copy(*block_and_event)

    def try_take(self, *, settle: bool = False) -> torch.Tensor | None:
        """Return a block that no copy uses, or None. `settle`: if no block is free, wait for the oldest copy."""
        with self._changed:
            if (
                not settle
                and self._idle
                and (event := self._idle[0][1]) is not None
                and not event.query()
                and not self._unallocated
            ):
                return None
            block_and_event = self._next()
        return self._after_copy(*block_and_event) if block_and_event is not None else None

    def lend(self, nbytes: int) -> memoryview | None:
        """Return the first `nbytes` of a block, or None if `LENT` blocks are lent or all blocks are in use.

        The block returns to the ring when no view of its memory exists.
        """
        if len(self._lent) >= LENT or (block := self.try_take()) is None:
            return None
        array = block.numpy()[:nbytes]
        self._lent[block.data_ptr()] = LentBlock(block)
        weakref.finalize(array, self._return, block.data_ptr()).atexit = False
        return memoryview(array)  # type: ignore[arg-type]

    def lent(self, data: torch.Tensor) -> LentBlock | None:
        """Return the lent block whose memory begins with `data`, or None if `data` is in other memory."""
        return self._lent.get(data.data_ptr())

    def _return(self, address: int) -> None:
        lent_block = self._lent.pop(address)
        if lent_block.failed:
            self.replace_lost()
        else:
            self.give(lent_block.block, lent_block.event)

    def give(self, block: torch.Tensor, event: Any = None) -> None:
        """Return a block to the ring. `event`: event after the last copy that uses the block."""
        with self._changed:
            self._idle.append((block, event))
            self._changed.notify()

    def replace_lost(self) -> None:
        """Allow the allocation of a new block in place of a failed block, which a copy may still use."""
        with self._changed:
            self._unallocated += 1
            self._changed.notify()

    def _next(self) -> tuple[torch.Tensor, Any] | None:
        """Return a block, and its event to wait for, if any. Return None if all blocks are in use."""
        if self._idle and ((event := self._idle[0][1]) is None or event.query()):
            return self._idle.popleft()[0], None
        if self._idle and not self._unallocated:
            return self._idle.popleft()
        if self._unallocated:
            self._unallocated -= 1
            try:
                return self._allocate(), None
            except BaseException:
                self._unallocated += 1
                raise
        return None

    def _after_copy(self, block: torch.Tensor, event: Any) -> torch.Tensor:
        if event is not None:
            try:
                self._waits.until(event)
            except BaseException:
                self.replace_lost()
                raise
        return block


class DeviceCopies:
    """Copies between the host and one accelerator.

    Thread-safe. Create it while the stream on which ops run is current.

    Attributes:
        waits: tracks threads that wait for copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.waits = CopyWaits()
        self._compute = torch.accelerator.current_stream(device)
        self._up = self._new_stream()
        self._idle_down: deque[torch.Stream] = deque()
        self._ring = PinnedRing(_pinned_block, waits=self.waits)

    def _new_stream(self) -> torch.Stream:
        try:
            return torch.Stream(self._device)
        except (RuntimeError, NotImplementedError):  # MPS has one queue
            return self._compute

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return device memory for an upload. The memory belongs to the upload stream."""
        with self._up:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def receive_buffer(self, nbytes: int) -> memoryview | None:
        """Return page-locked memory that `write` need not copy; None if `nbytes` is unsuitable or no block is free."""
        return self._ring.lend(nbytes) if SMALL < nbytes <= BLOCK else None

    def write(self, target: torch.Tensor, data: torch.Tensor) -> None:
        """Copy bytes from the host to `target`. Afterwards, the caller may change the bytes."""
        if (lent_block := self._ring.lent(data)) is not None:
            self._write_lent(target, lent_block)
            return
        for piece in _pieces(data.numel()):
            block = self._ring.take()
            try:
                staged = block[: piece.stop - piece.start].copy_(data[piece])
                with self._up:
                    target[piece].copy_(staged, non_blocking=True)
                event = self._up.record_event()
            except BaseException:
                self._ring.replace_lost()
                raise
            self._ring.give(block, event)

    def _write_lent(self, target: torch.Tensor, block: LentBlock) -> None:
        try:
            with self._up:
                target.copy_(block.block[: target.numel()], non_blocking=True)
            block.event = self._up.record_event()
        except BaseException:
            block.failed = True
            raise

    def overwrite(self, target: torch.Tensor, data: torch.Tensor) -> None:
        """Copy bytes from the host to memory that ops use: after the ops issued so far, and before later ops."""
        self._up.wait_event(self._compute.record_event())
        self.write(target, data)
        self._compute.wait_event(self._up.record_event())

    def commit(self, target: torch.Tensor) -> torch.Tensor:
        """Make ops that are issued later wait, on the device, for the copies to `target`. Return `target`."""
        if self._up is self._compute:
            return target
        self._compute.wait_event(self._up.record_event())
        target.record_stream(self._compute)  # the upload stream must not reuse the memory while ops read it
        return target

    def start_delivery(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start a copy of `tensor` to the host. Return a function, to call once, that waits for the copy and returns it.

        The copy has the strides of `tensor`, unless `tensor` has gaps. It does not wait for ops issued later.
        Such ops must not write into `tensor` before the function has returned.
        """
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            host_copy = tensor.cpu()
            return lambda: host_copy
        extent = 1 + sum([(n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)])
        if not tensor.numel():
            extent = 0
        elif extent > tensor.numel():
            tensor, extent = tensor.contiguous(), tensor.numel()
        source = tensor.as_strided((extent,), (1,)).view(torch.uint8)
        with torch.inference_mode(mode=False):  # the block is written in inference mode and outside of it
            target = torch.empty(source.numel(), dtype=torch.uint8)
        copy_steps = self._copy_to_host(source, target)
        next(copy_steps)

        def finish() -> torch.Tensor:
            for _ in copy_steps:
                pass
            return target.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)

        return finish

    def _copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> Iterator[None]:
        """Issue the first copies, yield, then complete all copies. Blocks are returned even if the iterator is dropped."""
        is_small = source.numel() <= SMALL
        stream = self._compute if is_small else self._idle_down.pop() if self._idle_down else self._new_stream()
        if stream is not self._compute:
            stream.wait_event(self._compute.record_event())
        pieces = deque(_pieces(source.numel()))
        pending: deque[tuple[slice, torch.Tensor, Any]] = deque()
        try:
            self._issue(source, pieces, pending, stream)
            yield
            while pieces or pending:
                self._issue(source, pieces, pending, stream, settle=True)
                if pending:
                    self._finish(target, *pending.popleft())
                else:  # all blocks are in use by other threads, which may wait for this thread
                    piece = pieces.popleft()
                    with stream:
                        target[piece].copy_(source[piece])
        finally:
            for _, block, event in pending:
                self._ring.give(block, event)
            if not is_small:
                self._idle_down.append(stream)

    def _issue(
        self,
        source: torch.Tensor,
        pieces: deque[slice],
        pending: deque[tuple[slice, torch.Tensor, Any]],
        stream: torch.Stream,
        *,
        settle: bool = False,
    ) -> None:
        """Issue copies of the next pieces to free blocks. `settle`: True to wait for a block if no copy is pending."""
        while pieces and len(pending) < _PENDING:
            block = self._ring.try_take(settle=settle and not pending)
            if block is None:
                return
            piece = pieces.popleft()
            try:
                with stream:
                    block[: piece.stop - piece.start].copy_(source[piece], non_blocking=True)
                pending.append((piece, block, stream.record_event()))
            except BaseException:
                self._ring.replace_lost()
                raise

    def _finish(self, target: torch.Tensor, piece: slice, block: torch.Tensor, event: Any) -> None:
        try:
            self.waits.until(event)
            target[piece] = block[: piece.stop - piece.start]
        except BaseException:
            self._ring.replace_lost()
            raise
        self._ring.give(block)


def _pinned_block() -> torch.Tensor:
    """Return a page-locked block that is writable inside and outside of inference mode."""
    with torch.inference_mode(mode=False):
        return torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)


def _pieces(size: int) -> Iterator[slice]:
    """Return slices that cover `size` bytes in order, each of at most `BLOCK` bytes."""
    for start in range(0, size, BLOCK):
        yield slice(start, min(start + BLOCK, size))
