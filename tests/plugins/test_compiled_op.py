"""The guide to custom ops: the compiled op from nothing, and the Triton kernel, as docs/operators.md has them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path

import pytest

from djinn_core.cli.plugins import render

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(?:python|cpp)\n(?:#|//) (\S+)\n(.+?)^```", re.MULTILINE | re.DOTALL)
FILES = dict(BLOCK.findall(TEXT))
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-W", "ignore::pytest.PytestAssertRewriteWarning")
KEPT = ROOT / "build" / "custom-op-guide"  # as other compiled libraries: made again when a source changes


def write(path, text):
    """Write a file unless it has this text. ninja compares modification times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


@pytest.fixture(name="run", scope="module")
def _run(python, plain_environment):
    """Run Python in a folder, and return what it printed."""

    def run(folder, *arguments, **variables):
        kept = {"PYTHONPATH": str(folder), "TORCH_EXTENSIONS_DIR": str(KEPT / "built")}
        done = python.run(*arguments, cwd=folder, env=plain_environment | kept | variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Return the package that steps 1 to 6 make. Later runs reuse it."""
    rendered = render("my-kernels", "operators", tmp_path_factory.mktemp("guide"))
    (rendered / "tests" / "test_my_kernels.py").unlink(missing_ok=True)
    (rendered / "tests" / "test_example.py").unlink(missing_ok=True)
    folder = KEPT / rendered.name
    for source in rendered.rglob("*"):
        if source.is_file() and str(source.relative_to(rendered)) not in FILES:
            write(folder / source.relative_to(rendered), source.read_text(encoding="utf-8"))
    for name, text in FILES.items():
        if name != "scaling.py":
            write(folder / name, text)
    return folder


@pytest.mark.skipif(shutil.which("ninja") is None or shutil.which("c++") is None, reason="no ninja, or no C++ compiler")
def test_compiled_op_of_guide_runs(run, package):
    chosen = {"DJINN_PLUGINS": "tcp,djinn_my_kernels"}  # as if it were installed
    (expected,) = re.findall(r"^```text\n(.+?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert run(package, "-W", "ignore", "use.py", **chosen) == expected
    assert "6 passed" in run(package, "-m", "pytest", *OPTIONS, "tests")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernel_of_guide_runs(run, tmp_path):
    write(tmp_path / "scaling.py", FILES["scaling.py"])
    write(
        tmp_path / "use.py",
        "import djinn, torch\n"
        "from scaling import scale\n"
        "djinn.configure(operators=['module:scaling'])\n"
        "x = torch.arange(4.0, device='remote_accelerator:0').requires_grad_()\n"
        "with djinn.capture() as captured:\n"
        "    y = scale(x, 3.0)\n"
        "y.sum().backward()\n"
        "print(y.tolist(), x.grad.tolist(), 'scale' in captured.graph.by_op)\n",
    )
    interpreted = {} if os.environ.get("SERVED_DEVICE") == "cuda" else {"TRITON_INTERPRET": "1"}
    said = run(tmp_path, "-W", "ignore", "use.py", **interpreted)
    assert said == "[0.0, 3.0, 6.0, 9.0] [3.0, 3.0, 3.0, 3.0] True\n"
