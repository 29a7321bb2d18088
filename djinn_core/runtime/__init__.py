"""The client's session: it prepares, submits and fetches, and keeps what an error message will need."""
