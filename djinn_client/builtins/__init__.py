"""The built-in plugin of clients."""
