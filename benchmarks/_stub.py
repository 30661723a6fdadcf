"""A stub of the service in a process of its own: grants everything, parses as little as it can."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_BODY = b'{"expires_at": "2030-01-01T00:00:00Z", "fencing_token": 4503599627370497, "held": true}'


def _answer(status: bytes, body: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        status,
        len(body),
        body,
    )


_ANSWERS = {
    b"PO": _answer(b"201 Created", _BODY),
    b"PA": _answer(b"200 OK", _BODY),
    b"GE": _answer(b"200 OK", _BODY),
    b"DE": _answer(b"204 No Content").replace(b"Content-Length: 0\r\n", b""),
}


class Stub(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while b"\r\n\r\n" in self.buffer:
            head, _, rest = self.buffer.partition(b"\r\n\r\n")
            length = 0
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    length = int(line[15:])
            if len(rest) < length:
                return
            self.buffer = rest[length:]
            self.transport.write(_ANSWERS[head[:2]])


async def _main() -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # ends with its parent


@contextmanager
def stub_service() -> Iterator[str]:
    """The URL of a running stub."""
    command = [sys.executable, "-m", "benchmarks._stub"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.communicate()


if __name__ == "__main__":
    asyncio.run(_main())
