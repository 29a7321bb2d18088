"""Replies of executors, and failures there."""
