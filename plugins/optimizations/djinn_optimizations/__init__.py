"""Optimizations: plugins that rewrite programs before they run."""
