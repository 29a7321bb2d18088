"""The plugins that are part of the client."""
