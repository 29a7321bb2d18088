"""Stages of the compiler pipeline: pure functions from frozen values to the next stage's result, independent of each other."""
