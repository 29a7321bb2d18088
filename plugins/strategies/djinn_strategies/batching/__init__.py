"""Batch several sessions: compute products with shared weights once for all sessions, and row-wise ops next to them."""
