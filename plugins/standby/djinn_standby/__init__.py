"""The plugin `standby`: if the server of a session is lost, another server continues the session."""

from __future__ import annotations

from djinn.hooks import ChannelContext, ChannelWrapper, ClientChannel, hookimpl

djinn_api_version = "2.0"


class Standby(ChannelWrapper):
    """Logs the frames that a session sends, and replays them on a server of the setting `standby` if its server is lost."""

    name = "standby"
    takes_over = True

    def wrap(self, channel: ClientChannel, context: ChannelContext) -> ClientChannel:
        """Wrap a channel, as `ChannelWrapper.wrap`. Return the channel itself if no standby server is configured."""
        if not context.standby:
            return channel
        from djinn_standby.connection import with_standby  # few sessions need it

        return with_standby(channel, context)


@hookimpl
def djinn_register_channels() -> list[ChannelWrapper]:
    """Register the plugin's channel wrapper."""
    return [Standby()]
