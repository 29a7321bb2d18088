"""Plugins for convolutional networks: the pattern `convolution`, and pipelining over several devices."""
