"""Optimizations: rewrites of programs before they run."""
