"""Several executors behind one device: where values are, which of them runs what, and what travels between them."""
