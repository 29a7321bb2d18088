"""Connections over sockets: framed byte streams, TLS, certificate renewal, and detection of dead peers."""
