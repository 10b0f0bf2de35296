"""Data files over HTTP, from the node that wrote them to the nodes that keep copies.

Each rank with files in a near tier serves them, on a port of its own, while their save is published: nothing
else can be asked for, and only with the key that the rank sends to the others in its record. Plain HTTP by
Python's own library, as open to the network as NCCL and gloo are. The operating system moves the bytes
(sendfile), so that a trainer in the same process keeps the interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import http.client
import ipaddress
import os
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, BinaryIO

from megatron_datastates.config import MIB
from megatron_datastates.engine import native
from megatron_datastates.files import open_regular, size_of
from megatron_datastates.format.values import SaveId, is_data_file_name
from megatron_datastates.threads import BackgroundThread

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
TIMEOUT_SECONDS = 30.0  # without a byte, on both sides
RATE_SECONDS, LEAST_BYTES = 60.0, 16 * MIB  # a link that moves less in this time does not count as working
MOST_UNAUTHENTICATED = 32  # connections at a time that have not shown the key; each has a thread
_ENDPOINT = struct.Struct("<16sH16s")
_KEY_BYTES = 16
_STRIDE_BYTES = 64 * MIB  # after which the page cache lets go of what was sent
_ANY_PORT = 9  # no packet is sent to it
_PAUSE_SECONDS = 0.1  # when no connection can be taken


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where a rank serves its files."""

    address: bytes  # 16 bytes: of IPv6, or of IPv4 mapped into it
    port: int
    key: bytes  # 16 bytes

    def encode(self) -> bytes:
        return _ENDPOINT.pack(self.address, self.port, self.key)

    @classmethod
    def decode(cls, data: bytes) -> Endpoint | None:
        """Returns None for a rank that serves nothing."""
        endpoint = cls(*_ENDPOINT.unpack(data))
        return endpoint if endpoint.port else None

    @property
    def host(self) -> str:
        """Returns the address to connect to.

        A rank that reaches the job's master by a loopback address is on its node.
        """
        address = ipaddress.IPv6Address(self.address)
        plain = address.ipv4_mapped or address
        return _master() if plain.is_loopback else str(plain)


def _master() -> str:
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def own_address() -> Address:
    """Returns this node's address in the network that the job's master is in. Raises OSError."""
    found = socket.getaddrinfo(_master(), _ANY_PORT, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]  # a name without any raises
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # chooses a route; sends nothing
        return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])


class Server:
    """Serves data files of saves in flight. Thread-safe.

    Raises:
        OSError: no port could be opened.
        RuntimeError: no thread could be started.
    """

    def __init__(self) -> None:
        address = own_address()
        mapped = address if address.version == 6 else ipaddress.IPv6Address(f"::ffff:{address}")
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._folders: dict[str, Path] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._http = _HttpServer(address, self._key, self._open)
        self.endpoint = Endpoint(mapped.packed, self._http.server_address[1], self._key)
        self._thread = BackgroundThread(self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                self._http.process_request(*self._http.get_request())  # starts a thread
            except (OSError, RuntimeError):
                time.sleep(_PAUSE_SECONDS)

    @property
    def is_lost(self) -> bool:
        """Whether nobody is served any more, although it was not closed (BackgroundThread.is_lost)."""
        return self._thread.is_lost

    def offer(self, save_id: SaveId, folder: Path) -> None:
        """Serves the files in a folder, as those of a save, from now on."""
        with self._lock:
            self._folders[str(save_id)] = folder

    def withdraw(self, save_id: SaveId) -> None:
        """Serves a save's files no more; what is being sent goes on."""
        with self._lock:
            self._folders.pop(str(save_id), None)

    def _open(self, path: str) -> BinaryIO | None:
        """Opens what a request names; None if that is not to be had."""
        _, save, name = path.split("/") if path.count("/") == 2 else ("", "", "")
        with self._lock:
            folder = self._folders.get(save)
        if folder is None or not is_data_file_name(name):
            return None
        try:
            return open_regular(folder / name, buffering=0)
        except OSError:
            return None

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._http.socket.shutdown(socket.SHUT_RDWR)  # ends the wait for connections
        self._http.server_close()


class _HttpServer(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close = True, False
    request_queue_size = 64

    def __init__(self, address: Address, key: bytes, open_file: Any) -> None:
        self.address_family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        self.expected = f"Bearer {key.hex()}".encode()
        self.open_file = open_file
        self._unauthenticated: dict[Any, None] = {}  # connections that have not shown the key, oldest first
        self._lock = threading.Lock()
        # On the master's own node, others connect to the master's address.
        super().__init__(("" if address.is_loopback else str(address), 0), _Handler)
        native.close_in_forked_child(self.fileno())

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection. If too many others say nothing, the oldest one is closed."""
        with self._lock:
            self._unauthenticated[request] = None
            if len(self._unauthenticated) > MOST_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread notices, and closes it
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self.shutdown_request(request)
            raise

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        self.note_known(request)
        super().shutdown_request(request)

    def note_known(self, request: Any) -> None:
        """Notes that a connection has shown the key, or is over."""
        with self._lock:
            self._unauthenticated.pop(request, None)

    def server_close(self) -> None:
        native.forget_descriptor(self.fileno())
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: the other side has closed the connection, and reports it."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT_SECONDS
    server: _HttpServer

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, self.server.expected):
            self.send_error(403)
            return
        self.server.note_known(self.connection)
        file = self.server.open_file(self.path)
        if file is None:
            self.send_error(404)
            return
        with file:
            size = size_of(file)
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            for at in range(0, size, _STRIDE_BYTES):
                self.connection.sendfile(file, at, min(_STRIDE_BYTES, size - at))
                os.posix_fadvise(file.fileno(), 0, at + _STRIDE_BYTES, os.POSIX_FADV_DONTNEED)

    def log_message(self, *args: object) -> None:
        """Says nothing: the side that asks reports what fails."""


def download(endpoint: Endpoint, save_id: SaveId, name: str, size: int, buffer: memoryview) -> Iterator[int]:
    """Yields after each piece of a file how many bytes of `buffer` it fills: all of it, but for the last one.

    Raises:
        TimeoutError: the other side says nothing for TIMEOUT_SECONDS, or too little in RATE_SECONDS.
        OSError: it cannot be reached, or has another file.
    """
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request(
            "GET", f"/{save_id}/{name}", headers={"Authorization": f"Bearer {endpoint.key.hex()}"}
        )
        response = connection.getresponse()
        if response.status != 200 or response.length != size:
            raise OSError(
                f"expected {size} bytes of {name}, found {response.length} "
                f"({response.status} {response.reason})"
            )
        waited, moved = 0.0, 0
        for at in range(0, size, len(buffer)):
            piece = buffer[: min(len(buffer), size - at)]
            done = 0
            while done < len(piece):
                begin = time.monotonic()
                count = response.fp.readinto1(piece[done:])  # what has arrived, to see how much that is
                if not count:
                    raise OSError(f"{name} ended after {at + done} of {size} bytes")
                done, moved, waited = done + count, moved + count, waited + time.monotonic() - begin
                if waited >= RATE_SECONDS:
                    if moved < LEAST_BYTES:
                        raise TimeoutError(f"{moved} bytes of {name} arrived in {waited:.0f} s")
                    waited, moved = 0.0, 0
            yield len(piece)
    except http.client.HTTPException as error:
        raise OSError(f"no answer that could be understood ({type(error).__name__})") from error
    except OSError as error:
        kind = TimeoutError if isinstance(error, TimeoutError) else OSError
        raise kind(f"{endpoint.host}, port {endpoint.port}: {error.strerror or error}") from error
    finally:
        connection.close()
