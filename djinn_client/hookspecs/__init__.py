"""The contract for plugins of clients: kinds that only clients call. `djinn.hooks` has their names."""
