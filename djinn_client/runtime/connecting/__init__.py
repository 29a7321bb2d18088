"""Connecting: begin a session from settings, and resume it after the loss of a connection, an executor or a server."""
