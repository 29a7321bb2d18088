"""Run the command with `python -m djinn_core.cli` if its script is not on the path."""

from djinn_core.cli import main

main(prog_name="djinn")
