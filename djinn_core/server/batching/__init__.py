"""Batches across sessions: products with weights that several sessions share, computed for all of them at once."""
