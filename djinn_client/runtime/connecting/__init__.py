"""Connecting: begin a session from settings, and resume it after a lost connection, executor or server."""
