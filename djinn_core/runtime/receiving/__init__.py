"""What executors answer, and what failed there."""
