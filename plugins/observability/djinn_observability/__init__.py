"""Views of clients, servers and programs.

`djinn --help` imports this module, so it imports nothing.

- `opentelemetry`: traces and metrics. `dashboard`: servers, in a browser and in a terminal.
- `html`: pictures of programs. `progress`: progress bars.
"""
