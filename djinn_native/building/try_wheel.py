"""Load the installed library, which runs its self-test, to check a wheel that was built elsewhere."""

from __future__ import annotations

import torch

import djinn_native

if __name__ == "__main__":
    djinn_native.load()
    print(f"djinn-native {djinn_native.__version__} works with PyTorch {torch.__version__}")
