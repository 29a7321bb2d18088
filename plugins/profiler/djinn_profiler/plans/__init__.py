"""Plans without a session: a plan cache keyed by content, and `Scheduler`."""
