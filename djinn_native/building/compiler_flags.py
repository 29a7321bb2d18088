"""Print flags for clang-tidy, one per line.

PyTorch's headers count as system headers, so that clang-tidy reports nothing in them.
"""

from __future__ import annotations

from torch.utils.cpp_extension import include_paths

if __name__ == "__main__":
    folders = [flag for path in include_paths() for flag in ("-isystem", path)]
    print("-xc++", "-std=c++20", '-DDJINN_NATIVE_VERSION="0"', *folders, sep="\n")
