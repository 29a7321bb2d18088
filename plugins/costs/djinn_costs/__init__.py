"""A cost model from measured times, and the placement policy that weighs such times."""
