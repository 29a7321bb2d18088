"""The gateway process: who gets in, to which executor, and what people who run a server see of it."""
