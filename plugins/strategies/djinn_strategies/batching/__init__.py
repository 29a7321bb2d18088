"""Batches across sessions: products with shared weights, and the ops between them, for all sessions at once."""
