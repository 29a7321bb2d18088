"""Matching language for patterns: a small language over ops."""
