"""The wire format, without I/O: encoding of messages, and framing of byte streams."""
