"""Operating system calls, with one implementation per platform. All platform-specific code of Djinn's core is here.

If a platform lacks a feature, the function reports this by its result or by `OSError`, and its caller logs it.
"""
