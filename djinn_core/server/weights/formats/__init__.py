"""Headers of files with weights: which tensors they have, and how those are made from the files' bytes."""
