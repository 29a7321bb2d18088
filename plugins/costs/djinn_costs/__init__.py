"""A cost model that predicts times from measurements, and a placement policy that minimises predicted times."""
