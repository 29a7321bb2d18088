"""Short form of `run_endings.py`: programs end at random moments, and the next program takes their place on the server."""

from __future__ import annotations

from servers import start_server

from evaluation.chaos.run_endings import OPTIONS, endings


def test_ended_program_frees_its_slot(python, plain_environment, tmp_path):
    server = start_server(python.start, tmp_path, *OPTIONS, env=plain_environment)
    try:
        seen = list(endings(python, server, plain_environment, 6, seed=4))
    finally:
        server.stop()
    assert len({ending.end for ending in seen}) > 2
    assert server.log.read_text().count("session ended  ") == 7, server.log.read_text()
