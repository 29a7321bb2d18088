"""The contract for plugins of servers: kinds that only gateways and executors call. `djinn.hooks` has their names."""
