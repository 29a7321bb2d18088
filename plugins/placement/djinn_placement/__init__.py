"""Placement policies that need no cost model."""
