"""Uploads and loads of checkpoints in an object store, beside the client's own of the same bytes.

The store is moto's S3 in a process of its own, on the loopback. It is written in Python and takes a core, so
rates are the store's as much as anybody's: what can be compared is the contenders with each other, and the
CPU time that each takes. Sizes of parts are the client's defaults.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch

import megatron_datastates as ds
from benchmarks import machine
from benchmarks.command import (
    PATH,
    Result,
    benchmark_command,
    load_average,
    machine_line,
    markdown_table,
    measure_parts,
    scratch,
    write_results,
)
from benchmarks.rounds import Bar, interleave, median, spread
from megatron_datastates import stores
from megatron_datastates.config import MIB, Options
from megatron_datastates.engine.faults import Faults
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.near.copying import Copier, Limit

_FILES = 4
_AT_ONCE = 2  # files that a drain uploads
_RANGE_BYTES, _RANGES_AT_ONCE = 16 * MIB, 8  # as loads ask for them
_PACKAGES = ("multi-storage-client", "boto3", "moto")
_READY_SECONDS = 60.0


class Store:
    """The server, and the checkpoints: one for each data file, in a directory and in the store."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env=os.environ | {"TMPDIR": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _await_port(port)
        _configure(folder / "msc.json", f"http://127.0.0.1:{port}")
        self.near = [folder / f"iter_{number:07d}" for number in range(1, _FILES + 1)]
        self.far = [stores.path_of(f"msc://bench/run/{path.name}") for path in self.near]
        self.state = {f"w{n}": torch.arange(file_bytes // 32, dtype=torch.float32) + n for n in range(8)}
        for path in self.near:
            ds.save(self.state, path)
        self.bytes = sum(entry.bytes for path in self.near for entry in Checkpoint.open(path).manifest.files)

    def close(self) -> None:
        self._server.kill()
        self._server.wait()

    def cpu_seconds(self) -> float:
        """Returns the CPU time that the server has taken."""
        fields = Path(f"/proc/{self._server.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _await_port(port: int) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"moto's server did not answer within {_READY_SECONDS:g} s")
        time.sleep(0.1)


def _configure(path: Path, address: str) -> None:
    import boto3

    names = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    s3 = boto3.client("s3", endpoint_url=address, region_name="us-east-1", **names)
    s3.create_bucket(Bucket="checkpoints")
    credentials = {"type": "S3Credentials", "options": {"access_key": "test", "secret_key": "test"}}
    options = {"base_path": "checkpoints", "endpoint_url": address, "region_name": "us-east-1"}
    profile = {"storage_provider": {"type": "s3", "options": options}, "credentials_provider": credentials}
    path.write_text(json.dumps({"profiles": {"bench": profile}}))
    os.environ["MSC_CONFIG"] = str(path)


@contextlib.contextmanager
def _store(folder: Path, file_bytes: int) -> Iterator[Store]:
    store = Store(folder, file_bytes)
    try:
        yield store
    finally:
        store.close()


def _client(path: Path) -> tuple[Any, str]:
    import multistorageclient

    found: tuple[Any, str] = multistorageclient.resolve_storage_client(str(path))
    return found


# -- contenders: each moves all data files once ------------------------------------------------------------


def _upload_by_client(near: Path, far: Path) -> None:
    for entry in Checkpoint.open(near).manifest.files:
        client, key = _client(far / entry.name)
        client.upload_file(key, str(near / entry.name))


def _upload_by_drain(near: Path, far: Path) -> None:
    manifest = Checkpoint.open(near).manifest
    copier = Copier(Options(), Faults(""), Limit(0))
    for entry in manifest.files:
        copier.copy(near / entry.name, far / entry.name, manifest, entry, lambda count: None)


def _download_whole(store: Store) -> None:
    for near, far in zip(store.near, store.far, strict=True):
        for entry in Checkpoint.open(near).manifest.files:
            client, key = _client(far / entry.name)
            assert len(client.read(key)) == entry.bytes


def _download_ranges(store: Store) -> None:
    with ThreadPoolExecutor(_RANGES_AT_ONCE) as threads:
        for near, far in zip(store.near, store.far, strict=True):
            for entry in Checkpoint.open(near).manifest.files:
                begins = range(0, entry.bytes, _RANGE_BYTES)
                counts = [min(_RANGE_BYTES, entry.bytes - begin) for begin in begins]
                pieces = threads.map(functools.partial(stores.read, far / entry.name), begins, counts)
                assert sum(map(len, pieces)) == entry.bytes


def _load(store: Store) -> None:
    for far in store.far:
        targets = {name: torch.empty_like(tensor) for name, tensor in store.state.items()}
        ds.load(far, into=targets)
        assert all(targets[name].equal(tensor) for name, tensor in store.state.items())


def _uploads(store: Store, upload: Callable[[Path, Path], None]) -> None:
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(upload, store.near, store.far))


# -- parts ------------------------------------------------------------------------------------------------


def _measure(store: Store, repeats: int, contenders: dict[str, Callable[[], None]], clear: bool) -> Result:
    cpu: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}

    def one(name: str) -> float:
        for far in store.far if clear else ():
            for data in [path for path in stores.names_below(far) if path.startswith("data-")]:
                stores.remove(far / data)
        begin, own, servers = time.perf_counter(), time.process_time(), store.cpu_seconds()
        contenders[name]()
        seconds = time.perf_counter() - begin
        cpu[name].append((time.process_time() - own, store.cpu_seconds() - servers))
        return store.bytes / seconds

    found = interleave(repeats, {name: functools.partial(one, name) for name in contenders})
    return {
        name: {
            "mb_per_s": round(median(rates) / 1e6, 1),
            "spread_mb_per_s": spread([rate / 1e6 for rate in rates]),
            "cpu_s_per_gb": round(median([own for own, _ in cpu[name][1:]]) / store.bytes * 1e9, 2),
            "cpu_s_per_gb_of_the_server": round(
                median([servers for _, servers in cpu[name][1:]]) / store.bytes * 1e9, 2
            ),
        }
        for name, rates in found.items()
    }


def _table(results: Result) -> str:
    rows = [
        (
            part,
            name,
            one["mb_per_s"],
            " to ".join(f"{rate:.0f}" for rate in one["spread_mb_per_s"]),
            one["cpu_s_per_gb"],
            one["cpu_s_per_gb_of_the_server"],
        )
        for part in ("upload", "download")
        for name, one in results[part].items()
    ]
    headings = ["", "", "MB/s", "spread", "CPU s/GB", "CPU s/GB of the server"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return "\n".join(
        [
            f"### Object stores: {results['mb']} MB in {_FILES} data files, {results['machine']['date']}",
            "",
            f"{machine_line(results['machine'], results)} {versions}. The store is moto's server.",
            "",
            *markdown_table(headings, rows),
            "",
        ]
    )


@benchmark_command
@click.option("--mib", type=click.IntRange(min=1), default=128, help="MiB of each of 4 data files.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="Rounds of each comparison.")
@click.option(
    "--quick", "is_quick", is_flag=True, help="4 MiB, one round: seconds, and figures that mean little."
)
@click.option("--folder", type=PATH, default=".", help="Where checkpoints and the server's files are.")
@click.option("--out", type=PATH, help="Write the results here, and a table beside it.")
def run(mib: int, repeats: int, is_quick: bool, folder: Path, out: Path | None) -> None:
    """Measures uploads and loads of checkpoints in an object store, beside the client's own.

    Needs the packages moto[server] and multi-storage-client[boto3]. The store is in memory if the folder is.

    \b
    Examples:
      python -m benchmarks.object_store --folder /dev/shm       # about 2 minutes
      python -m benchmarks.object_store --quick                 # only to see that it works
      python -m benchmarks.object_store --folder /dev/shm --out benchmarks/results/object_store.json
    """
    if is_quick:
        mib, repeats = 4, 1
    results: Result = {
        "machine": machine.describe(folder),
        "versions": {name: machine.version(name) for name in _PACKAGES},
        "load_average": load_average(),
        "repeats": repeats,
    }
    with scratch(folder) as inside, _store(inside, mib * MIB) as store:
        results["mb"] = round(store.bytes / 1e6)
        for near, far in zip(store.near, store.far, strict=True):
            _upload_by_drain(near, far)
            others = [path for path in near.iterdir() if not path.name.startswith("data-")]
            for path in sorted(others, key=lambda path: path.name == MANIFEST_NAME):
                stores.write(far / path.name, path.read_bytes())
        parts: dict[str, dict[str, Callable[[], None]]] = {
            "upload": {
                "the client": functools.partial(_uploads, store, _upload_by_client),
                "datastates, every block checked": functools.partial(_uploads, store, _upload_by_drain),
            },
            "download": {
                "the client, whole objects": functools.partial(_download_whole, store),
                "the client, ranges of 16 MiB, 8 at a time": functools.partial(_download_ranges, store),
                "datastates: a load, every block checked": functools.partial(_load, store),
            },
        }

        def measure(part: str) -> tuple[Result, list[Bar]]:
            return _measure(store, repeats, parts[part], clear=part == "upload"), []

        measure_parts(results, list(parts), measure)
    write_results(results, out)
    if out is not None:
        out.with_suffix(".md").write_text(_table(results))


if __name__ == "__main__":
    run()
