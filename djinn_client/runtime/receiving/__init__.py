"""Replies of executors, and their failures."""
