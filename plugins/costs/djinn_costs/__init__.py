"""A cost model from measured times, and a placement policy that uses predicted times."""
