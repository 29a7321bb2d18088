"""Print flags with which clang-tidy reads the sources: PyTorch's headers, as those of a system, so that it says nothing of them."""

from __future__ import annotations

import shlex

from torch.utils.cpp_extension import include_paths

if __name__ == "__main__":
    folders = [flag for path in include_paths() for flag in ("-isystem", path)]
    print(shlex.join(["-std=c++20", '-DDJINN_NATIVE_VERSION="0"', *folders]))
