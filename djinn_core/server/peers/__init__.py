"""Values from executor to executor."""
