"""Contract for plugins of servers: the hooks that only gateways and executors call. `djinn.hooks` exports them."""
