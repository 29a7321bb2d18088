"""For convolutional networks: the pattern `convolution`, and pipelines over several devices."""
