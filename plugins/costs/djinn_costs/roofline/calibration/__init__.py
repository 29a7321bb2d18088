"""Measuring devices for cost models, and checking what the models predict."""
