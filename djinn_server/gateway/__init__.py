"""The gateway process: authentication, admission, routing to executors, and operations endpoints."""
