"""Plugins: discovery, loading, and a status report for each."""
