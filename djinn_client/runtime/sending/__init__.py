"""Encoding and sending of programs and tensors."""
