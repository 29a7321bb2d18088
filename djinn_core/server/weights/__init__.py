"""Bytes that become values, what is kept of them for the next time, and how much of the disk that takes."""
