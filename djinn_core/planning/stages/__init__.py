"""Stages of the planning pipeline: pure functions from immutable values to the next stage's result, independent of each other."""
