"""Run the notebooks of `examples/`: `python -m evaluation notebooks`. `--write` stores their new outputs.

python -m evaluation notebooks [--write] [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS = 600  # timeout per cell on a busy machine


def run(file: Path, *, write: bool) -> str:
    """Run a notebook. Return the reason of a failure, or an empty string."""
    notebook = nbformat.read(file, as_version=4)
    private = Config(KernelManager={"transport": "ipc"})  # without ports for others to connect to
    client = NotebookClient(notebook, config=private, kernel_name="python3", timeout=SECONDS, record_timing=False)
    # no user configuration, no network, and one thread per process
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DJINN_")}
    offline = {"DJINN_CONFIG": os.devnull, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    offline |= {"OMP_NUM_THREADS": "1", "DJINN_THREADS": "1"}
    try:
        client.execute(env=environment | offline)
    except CellExecutionError as error:
        return re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    notebook.metadata.language_info = {"name": "python"}
    if write:
        nbformat.write(notebook, file)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names of notebooks without .ipynb; without names, all run")
    parser.add_argument("--write", action="store_true", help="write the outputs into the files")
    options = parser.parse_args()
    begun, has_failed = time.monotonic(), False
    for file in sorted(EXAMPLES.glob("*.ipynb")):
        if options.names and file.stem not in options.names:
            continue
        since = time.monotonic()
        error = run(file, write=options.write)
        print(f"{file.stem:20} {time.monotonic() - since:6.1f} s  {error or 'ran'}", flush=True)
        has_failed |= bool(error)
    print(f"{'all':20} {time.monotonic() - begun:6.1f} s")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
