"""Memory of an executor's device: a table of all storages, eviction, spilling, and values of idle sessions."""
