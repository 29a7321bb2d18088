"""Python side of the native device: the functions that C++ calls, and the functions of C++ that Python calls."""
