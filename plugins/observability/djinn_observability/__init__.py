"""Views of clients, servers and programs.

It is imported for `djinn --help`, so it imports nothing.

- `opentelemetry`: traces and metrics. `dashboard`: servers in a browser and in a terminal. `html`: pictures of programs. `progress`: progress bars.
"""
