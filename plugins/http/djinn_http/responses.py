"""Parser of one HTTP response, without I/O."""

from __future__ import annotations

from typing import Final

import httptools

from djinn.errors import ProtocolError
from djinn.hooks import FrameDecoder
from djinn_core.system.printable import printable
from djinn_http.dialect import UPGRADE

_SCRATCH_BYTES: Final = 64 << 10
_TEXT_BYTES: Final = 4096
_HEADER_BYTES: Final = 2 * _SCRATCH_BYTES  # with what is read of the body together with their end
_OK: Final = 200
SWITCHED: Final = 101


class ResponseReader:
    """Parser of one response.

    The body of a response with status 200 goes to `decoder`, large parts without a copy. Other bodies are stored as text.

    Attributes:
        begun: True if a byte has arrived.
        complete: True if the last byte has arrived.
        status: status code, or 0 before the headers have arrived.
        reusable: True if the connection may carry another request after the response.
        rest: bytes that arrived after an upgrade.
    """

    def __init__(self, decoder: FrameDecoder) -> None:
        self.begun = False
        self.complete = False
        self.status = 0
        self.reusable = False
        self.rest = b""
        self._upgrades = False
        self._decoder = decoder
        self._parser = httptools.HttpResponseParser(self)
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._parts: list[bytes] = []
        self._text = b""
        # Bytes of the body that are still to be read without the parser.
        self._direct = 0

    def header(self, name: str) -> str:
        """Return the value of a header, or an empty string."""
        return self._headers.get(name.lower(), "")

    @property
    def text(self) -> str:
        """Return the beginning of a body with another status than 200, for messages."""
        return printable(self._text.decode("utf-8", "replace").strip())

    def buffer(self) -> memoryview:
        """Return memory for the next received bytes."""
        return self._decoder.buffer()[: self._direct] if self._direct else self._scratch

    def received(self, count: int) -> None:
        """Parse `count` bytes, which were written to the start of the last `buffer()`.

        Raises:
            ProtocolError: the bytes are not from a Djinn server.
        """
        self.begun = True
        if self._direct:
            self._decoder.received(count)
            self._direct -= count
            self.complete = not self._direct
            return
        if not self.status:
            self._header_bytes += count
            if self._header_bytes > _HEADER_BYTES:
                raise ProtocolError(f"the headers of the response have more than {_HEADER_BYTES:,} bytes")
        try:
            self._parser.feed_data(self._scratch[:count])
        except httptools.HttpParserUpgrade as end:
            if not self._upgrades:
                raise ProtocolError("the response is not HTTP/1.1; check the address and its proxies") from end
            self.status, self.complete, self.rest = SWITCHED, True, bytes(self._scratch[end.args[0] : count])
            return
        except httptools.HttpParserError as error:
            raise ProtocolError(f"the response is not HTTP/1.1: {error}") from error
        body = self._take_parts()
        self._read_rest_past_the_parser(body)

    # --- called by the parser -------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header, as the parser requires."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Handle the end of the headers, as the parser requires."""
        self.status = self._parser.get_status_code()
        self.reusable = self._parser.should_keep_alive()
        self._upgrades = self.status == SWITCHED and self.header("upgrade") == UPGRADE

    def on_body(self, body: bytes) -> None:
        """Handle a part of the body, as the parser requires."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """Handle the end of the response. An interim response (status 1xx) does not end it."""
        if self.status < _OK:
            self._headers.clear()
            self.status = 0
        else:
            self.complete = True

    # --------------------------------------------------------------------------------------------------------

    def _take_parts(self) -> int:
        nbytes = sum(map(len, self._parts))
        for part in self._parts:
            if self.status == _OK:
                self._decoder.feed(part)
            elif len(self._text) < _TEXT_BYTES:
                self._text += part
        self._parts.clear()
        return nbytes

    def _read_rest_past_the_parser(self, parsed_bytes: int) -> None:
        """Read a body of known length without the parser, which would copy the data."""
        if self.complete or self.status != _OK or "transfer-encoding" in self._headers:
            return
        length = self._headers.get("content-length", "")
        if length.isascii() and length.isdigit():
            self._direct = int(length) - parsed_bytes
