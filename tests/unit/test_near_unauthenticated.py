"""Near tiers among others: directories and connections that are not this job's, and links of little use."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.near import serving
from megatron_datastates.pipeline.near.serving import Server, download, own_address
from megatron_datastates.pipeline.publication import Outcome
from tests.unit.test_near_tier import Nodes, killed, recover


@pytest.fixture(autouse=True)
def master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Server, SaveId]]:
    save_id, server = SaveId(5, 1), Server()
    (tmp_path / save_id.data_file_name(0)).write_bytes(bytes(9000))
    server.offer(save_id, tmp_path)
    yield server, save_id
    server.close()


def test_a_near_tier_that_a_job_makes_is_its_users_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = Nodes(tmp_path)
    assert nodes.save(1).outcome is Outcome.PUBLISHED
    nodes.close()
    assert [stat.S_IMODE(root.stat().st_mode) for root in nodes.roots] == [0o700, 0o700]
    assert "alone" not in caplog.text


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_near_tier_that_others_can_write_to_is_warned_of(
    is_foreign: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = killed(tmp_path)
    assert "alone" not in caplog.text
    if is_foreign:
        if os.getuid() != 0:
            pytest.skip("needs root")
        os.chown(nodes.roots[0], 1, -1)
    else:
        nodes.roots[0].chmod(0o777)
    assert recover(nodes)[0] == 3
    assert f"the near tier {nodes.roots[0]} may not be this user's alone" in caplog.text


def test_a_link_that_moves_a_little_is_given_up(
    served: tuple[Server, SaveId], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trickle(self: socket.socket, file: BinaryIO, offset: int = 0, count: Any = None) -> int:
        with contextlib.suppress(OSError):
            for _ in range(count):
                self.sendall(b"x")
                time.sleep(0.01)
        return int(count)

    monkeypatch.setattr(serving, "RATE_SECONDS", 0.1)
    monkeypatch.setattr(socket.socket, "sendfile", trickle)
    server, save_id = served
    with pytest.raises(TimeoutError, match=r"bytes of data-00000-.* arrived in"):
        list(download(server.endpoint, save_id, save_id.data_file_name(0), 9000, memoryview(bytearray(9000))))


def test_files_are_served_in_the_masters_network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.99")
    try:
        address = own_address()
    except OSError:
        pytest.skip("there is no network")
    server = Server()
    assert server._http.server_address == (str(address), server.endpoint.port)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.endpoint.port), 20)
    socket.create_connection((server.endpoint.host, server.endpoint.port), 20).close()
    server.close()


def test_connections_without_the_key_are_few_and_hinder_nobody(
    served: tuple[Server, SaveId], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MOST_UNAUTHENTICATED", 4)
    server, save_id = served
    name, buffer = save_id.data_file_name(0), memoryview(bytearray(9000))
    address = ("127.0.0.1", server.endpoint.port)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address, 20)) for _ in range(5)]
        assert idle[0].recv(1) == b"", "the oldest is closed"
        assert list(download(server.endpoint, save_id, name, 9000, buffer)) == [9000]
        assert idle[1].recv(1) == b"", "and so is the next one"
        for one in idle[2:]:
            one.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert one.recv(12) == b"HTTP/1.1 403"


def test_connections_without_the_key_do_not_end_what_is_being_sent(
    served: tuple[Server, SaveId], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MOST_UNAUTHENTICATED", 2)
    server, save_id = served
    sent = socket.socket.sendfile
    others: list[socket.socket] = []

    def slow(self: socket.socket, file: BinaryIO, offset: int = 0, count: Any = None) -> int:
        for _ in range(3):  # the last of which has closed the first one, so all have been taken
            others.append(socket.create_connection(("127.0.0.1", server.endpoint.port), 20))
        assert others[0].recv(1) == b""
        return sent(self, file, offset, count)

    monkeypatch.setattr(socket.socket, "sendfile", slow)
    pieces = download(server.endpoint, save_id, save_id.data_file_name(0), 9000, memoryview(bytearray(9000)))
    assert list(pieces) == [9000]
    for one in others:
        one.close()
