"""Shape inference: result metadata without running ops, and checks of arguments that kernels would refuse."""
