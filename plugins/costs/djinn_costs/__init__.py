"""A cost model from measured times, and the placement policy that uses predicted times."""
