"""Intermediate representation: the frozen data classes that the pipeline's stages exchange, without I/O or global state."""
