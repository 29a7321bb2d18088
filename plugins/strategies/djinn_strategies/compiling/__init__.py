"""Background compilation of hot templates; compiled code is used if it is faster."""
