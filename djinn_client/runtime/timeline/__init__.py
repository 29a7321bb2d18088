"""Timelines: what `djinn.profile()` records of the client, its links and its executors, on one clock."""
