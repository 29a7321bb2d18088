"""Direct transfer of values between executors."""
