"""A channel wrapper for Djinn: count the frames that a session sends."""

from __future__ import annotations

from djinn.hooks import ChannelContext, ChannelWrapper, ClientChannel, Frame, WrappedChannel, get_logger, hookimpl

djinn_api_version = "2.0"


class CountingChannel(WrappedChannel):
    """Count sent frames, and log the count when the session ends."""

    def __init__(self, inner: ClientChannel, server: str) -> None:
        super().__init__(inner)
        self.server, self.frames = server, 0

    def send(self, frame: Frame) -> None:
        """Count a frame, and send it."""
        self.frames += 1
        super().send(frame)

    def close(self) -> None:
        """Log the count, and close the channel."""
        get_logger("djinn_example").info("frames were sent", server=self.server, frames=self.frames)
        super().close()


class ExampleChannels(ChannelWrapper):
    """Wrap each channel."""

    name = "example"

    def wrap(self, channel: ClientChannel, context: ChannelContext) -> ClientChannel:
        """Return a channel that counts its frames."""
        return CountingChannel(channel, context.server)


@hookimpl
def djinn_register_channels() -> list[ChannelWrapper]:
    """Return the channel wrappers of this plugin."""
    return [ExampleChannels()]
