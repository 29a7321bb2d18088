"""Compilers of programs that run often on a server, one subpackage each."""
