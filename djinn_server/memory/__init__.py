"""Memory of an executor: the table of storages, eviction, spilling, and the values of idle sessions."""
