"""Plans without a session: a cache by content, and `Scheduler`."""
