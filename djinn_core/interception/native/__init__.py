"""Python side of the native device: what the C++ of djinn-native asks, and what Python asks it."""
