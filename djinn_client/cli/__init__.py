"""Commands of `djinn` for clients."""
