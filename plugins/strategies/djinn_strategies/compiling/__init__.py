"""Compile hot templates in the background, and run the compiled code if it is faster than the ops."""
