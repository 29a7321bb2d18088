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
    """A channel that answers each frame with an equal frame, and records the calls of other methods."""

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
    """Tests that every channel wrapper must pass.

    Subclass this class and define the fixture `wrapper`. The sessions of the tests have no standby server.
    """

    @pytest.fixture
    def wrapper(self) -> ChannelWrapper:
        """Return the wrapper under test."""
        return missing(self, "wrapper", "your wrapper of channels")  # type: ignore[return-value]

    @pytest.fixture
    def inner(self) -> _Echo:
        """Return the channel to wrap, which answers each frame with an equal frame."""
        return _Echo()

    @pytest.fixture
    def wrapped(self, wrapper: ChannelWrapper, inner: _Echo) -> ClientChannel:
        """Return the wrapped channel."""
        attached = Attached("session", 1, DeviceInfo("cpu:0", "cpu"), "2.13.0")
        channel = wrapper.wrap(inner, ChannelContext("tcp://server:5556", attached))
        assert isinstance(channel, ClientChannel), f"`wrap` returned {channel!r}, which is no ClientChannel"
        return channel

    def test_wrapper_has_every_member(self, wrapper: ChannelWrapper) -> None:
        """The wrapper has all attributes and methods of `ChannelWrapper`."""
        require_protocol(wrapper, "channels")

    def test_frames_pass_in_order(self, wrapped: ClientChannel, inner: _Echo) -> None:
        """Frames and bodies pass in order in both directions, with the timeouts of the caller."""
        sent = [Frame(b"%d" % number, [bytes(number)]) for number in range(5)]
        for frame in sent:
            wrapped.send(frame)
        assert list(map(_content, inner.frames)) == list(map(_content, sent)), "`send` changed frames, or their order"
        received = [wrapped.receive(1.0) for _ in sent]
        assert list(map(_content, received)) == list(map(_content, sent)), "`receive` changed frames, or their order"
        with pytest.raises(TimeoutError):
            wrapped.receive(0.0)

    def test_calls_reach_the_wrapped_channel(self, wrapped: ClientChannel, inner: _Echo) -> None:
        """Calls that announce changing buffers or the end of the session reach the wrapped channel.

        Queries return the wrapped channel's answers.
        """
        wrapped.copy_borrowed()
        wrapped.limit_reconnect_seconds(3.0)
        wrapped.expire()
        wrapped.close()
        assert inner.calls == ["copy_borrowed", "limit_reconnect_seconds 3", "expire", "close"], (
            f"the wrapped channel got only the calls {inner.calls}"
        )
        assert wrapped.bytes_sent == inner.bytes_sent, "`bytes_sent` must be the figure of the wrapped channel"
        wrapped.limits = Limits(1, 2)
        assert inner.limits == Limits(1, 2), "`limits` must be set on the wrapped channel"


def _content(frame: Frame) -> tuple[bytes, list[bytes]]:
    return bytes(frame.head), [bytes(part) for part in frame.body]
