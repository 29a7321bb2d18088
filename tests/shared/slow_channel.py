"""A stranger's wrapper of channels: a slow network with a limited rate, which counts what it carries. It imports `djinn` alone."""

from __future__ import annotations

import time
from typing import Any

from djinn.hooks import ChannelContext, ChannelWrapper, ClientChannel, Frame, WrappedChannel, hookimpl

djinn_api_version = "2.0"


class SlowChannel(WrappedChannel):
    """A channel with a maximal rate and a delay for each frame, in both directions."""

    def __init__(self, inner: ClientChannel, seconds: float, rate: float) -> None:
        super().__init__(inner)
        self.seconds, self.rate = seconds, rate
        self.frames, self.nbytes = [0, 0], [0, 0]  # sent, received
        self.ended: list[str] = []

    def send(self, frame: Frame) -> None:
        self._carry(frame, 0)
        super().send(frame)

    def receive(self, timeout: float | None = None) -> Frame:
        frame = super().receive(timeout)
        self._carry(frame, 1)
        return frame

    def _carry(self, frame: Frame, direction: int) -> None:
        nbytes = len(frame.head) + sum(memoryview(part).nbytes for part in frame.body)
        self.frames[direction] += 1
        self.nbytes[direction] += nbytes
        time.sleep(self.seconds + nbytes / self.rate)

    def expire(self) -> None:
        self.ended.append("expire")
        super().expire()

    def close(self) -> None:
        self.ended.append("close")
        super().close()


class SlowNetwork(ChannelWrapper):
    """Make the channels of some servers slow."""

    name = "slow"

    def __init__(self, seconds: float = 0.002, rate: float = 50e6) -> None:
        self.seconds, self.rate = seconds, rate
        self.wrapped: list[SlowChannel] = []
        self.contexts: list[ChannelContext] = []

    def wrap(self, channel: ClientChannel, context: ChannelContext) -> ClientChannel:
        self.contexts.append(context)
        self.wrapped.append(SlowChannel(channel, self.seconds, self.rate))
        return self.wrapped[-1]


class Plugin:
    """The plugin as an object, so that each test has its own network."""

    djinn_api_version = djinn_api_version
    name = "slow"

    def __init__(self, network: SlowNetwork) -> None:
        self.network = network

    @hookimpl
    def djinn_register_channels(self) -> list[Any]:
        return [self.network]
