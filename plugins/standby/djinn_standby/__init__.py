"""The plugin `standby`: another server continues a session whose own server is lost."""

from __future__ import annotations

from djinn.hooks import ChannelContext, ChannelWrapper, ClientChannel, hookimpl

djinn_api_version = "2.0"


class Standby(ChannelWrapper):
    """Log what a session sends, and replay it on one of the servers of the setting `standby`."""

    name = "standby"
    takes_over = True

    def wrap(self, channel: ClientChannel, context: ChannelContext) -> ClientChannel:
        """Wrap a channel, as `ChannelWrapper.wrap`. Returns the channel itself if there is no other server."""
        if not context.standby:
            return channel
        from djinn_standby.connection import with_standby  # few sessions need it

        return with_standby(channel, context)


@hookimpl
def djinn_register_channels() -> list[ChannelWrapper]:
    """Register the plugin's channel wrapper."""
    return [Standby()]
