"""Connections between clients and servers: addresses, sockets, TLS, and exactly-once delivery of frames."""
