"""An operations server for Djinn: a route that tells a load balancer whether the server accepts clients."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from djinn.hooks import Credentials, Denial, OperationsAddress, OperationsServer, WatchedServer, hookimpl

djinn_api_version = "2.0"


class ExampleOperations(OperationsServer):
    """Serve the route `/ready`, which needs a token."""

    name, routes = "example", ("/ready",)

    def start(self, server: WatchedServer, address: OperationsAddress) -> str:
        """Begin to serve. The gateway calls this method once, while executors start."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                who = server.identify(Credentials(self.headers.get("Authorization", "")[7:]), self.path)
                self.wfile.write(b"HTTP/1.0 %d\r\n\r\n" % (401 if isinstance(who, Denial) else 503 if server.why_not_ready() else 200))

        self.listener = HTTPServer((address.host, address.port), Handler)
        threading.Thread(target=self.listener.serve_forever, daemon=True).start()
        return f"http://{address.host}:{self.listener.server_port}"

    def close(self) -> None:
        """Stop serving. The gateway calls this method once, after the last session has ended."""
        self.listener.shutdown()
        self.listener.server_close()


@hookimpl
def djinn_register_operations() -> list[OperationsServer]:
    """Return the operations server of this plugin."""
    return [ExampleOperations()]
