"""Python side of the device in C++: the functions that C++ calls, and the functions of C++ that Python calls."""
