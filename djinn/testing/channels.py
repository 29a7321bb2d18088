"""Conformance suite for wrappers of channels."""

from __future__ import annotations

from collections import deque

import pytest

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_client.hookspecs.channels import ChannelContext, ChannelWrapper
from djinn_client.hookspecs.client_channel import ClientChannel
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.wire.messages import Attached, DeviceInfo


class _Echo(ClientChannel):
    """A channel that returns each frame that is sent, and records calls of other methods."""

    logged = False
    bytes_sent = 7

    def __init__(self) -> None:
        self.limits, self.frames, self.calls = Limits(), deque[Frame](), list[str]()

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)

    def receive(self, timeout: float | None = None) -> Frame:
        del timeout
        if not self.frames:
            raise TimeoutError
        return self.frames.popleft()

    def copy_borrowed(self) -> None:
        self.calls.append("copy_borrowed")

    def expire(self) -> None:
        self.calls.append("expire")

    def limit_reconnect_seconds(self, patience: float) -> None:
        self.calls.append(f"limit_reconnect_seconds {patience:g}")

    def close(self) -> None:
        self.calls.append("close")


class ChannelConformance(Ending):
    """Conformance suite. Subclass it and define the fixture `wrapper`. Sessions have no standby servers."""

    @pytest.fixture
    def wrapper(self) -> ChannelWrapper:
        """Return the wrapper under test."""
        return missing(self, "wrapper", "your wrapper of channels")  # type: ignore[return-value]

    @pytest.fixture
    def inner(self) -> _Echo:
        """Return a channel that returns each frame."""
        return _Echo()

    @pytest.fixture
    def wrapped(self, wrapper: ChannelWrapper, inner: _Echo) -> ClientChannel:
        """Return the channel in the wrapper."""
        attached = Attached("session", 1, DeviceInfo("cpu:0", "cpu"), "2.13.0")
        channel = wrapper.wrap(inner, ChannelContext("tcp://server:5556", attached))
        assert isinstance(channel, ClientChannel), f"`wrap` returned {channel!r}, which is no ClientChannel"
        return channel

    def test_it_is_a_wrapper(self, wrapper: ChannelWrapper) -> None:
        """The wrapper has every member."""
        require_protocol(wrapper, "channels")

    def test_all_frames_pass_in_order(self, wrapped: ClientChannel, inner: _Echo) -> None:
        """Frames and bodies pass in order in both directions, and timeouts are passed on."""
        sent = [Frame(b"%d" % number, [bytes(number)]) for number in range(5)]
        for frame in sent:
            wrapped.send(frame)
        assert list(map(_content, inner.frames)) == list(map(_content, sent)), "`send` changed frames, or their order"
        received = [wrapped.receive(1.0) for _ in sent]
        assert list(map(_content, received)) == list(map(_content, sent)), "`receive` changed frames, or their order"
        with pytest.raises(TimeoutError):
            wrapped.receive(0.0)

    def test_the_channel_inside_is_told_and_asked(self, wrapped: ClientChannel, inner: _Echo) -> None:
        """The inner channel is notified of changing buffers and the session's end, and answers queries."""
        wrapped.copy_borrowed()
        wrapped.limit_reconnect_seconds(3.0)
        wrapped.expire()
        wrapped.close()
        assert inner.calls == ["copy_borrowed", "limit_reconnect_seconds 3", "expire", "close"], (
            f"the channel inside was told {inner.calls}"
        )
        assert wrapped.bytes_sent == inner.bytes_sent, "`bytes_sent` is not that of the channel inside"
        wrapped.limits = Limits(1, 2)
        assert inner.limits == Limits(1, 2), "`limits` of the channel inside were not set"


def _content(frame: Frame) -> tuple[bytes, list[bytes]]:
    return bytes(frame.head), [bytes(part) for part in frame.body]
