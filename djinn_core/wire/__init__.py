"""The wire format, without I/O: messages to bytes and back, frames to byte streams and back."""
