"""Shape inference: metadata of op results without running the ops, and checks of arguments that kernels would refuse."""
