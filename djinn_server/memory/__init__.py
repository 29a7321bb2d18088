"""Memory limits of an executor: eviction, spilling, reloading and rematerialization of values."""
