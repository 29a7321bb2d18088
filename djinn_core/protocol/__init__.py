"""Connections between clients and servers: addresses, sockets, TLS and frames that arrive once."""
