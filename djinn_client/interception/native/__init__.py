"""Python side of the C++ device: functions that C++ calls, and wrappers of C++ functions."""
