"""Op transformations before recording: autocast, decomposition, canonicalization, and composite ops that stay whole."""
