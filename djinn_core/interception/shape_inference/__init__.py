"""What an op returns, known without running it; and what kernels would refuse."""
