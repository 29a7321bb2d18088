"""Background compilation of hot templates; a compiled one is used where it is faster."""
