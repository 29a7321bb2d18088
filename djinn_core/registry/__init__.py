"""Plugins: finding them, loading them and telling what became of each."""
