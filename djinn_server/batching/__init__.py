"""Batches across sessions: products with weights that several sessions share, and what lies between them, computed for all of them at once."""
