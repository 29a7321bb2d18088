"""Connections over sockets: byte streams that carry frames, TLS, certificates that are read anew, peers that are gone."""
