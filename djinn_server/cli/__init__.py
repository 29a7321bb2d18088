"""Commands of `djinn` for servers."""
