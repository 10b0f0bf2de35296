"""An object store on the loopback: moto's implementation of S3 behind a real HTTP server, and its failures.

Programs find it by the configuration of the multi-storage client that `MSC_CONFIG` names.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

BUCKET = "checkpoints"
PROFILE = "store"
RUN = f"msc://{PROFILE}/run"
MIB = 1 << 20
Answer = tuple[str, str]  # status line and code of S3
UNAVAILABLE: Answer = ("503 Slow Down", "SlowDown")
EXPIRED: Answer = ("403 Forbidden", "ExpiredToken")
_ERROR = '<?xml version="1.0"?><Error><Code>{0}</Code><Message>{0} (injected)</Message></Error>'


class ObjectStore:
    """The store, as tests see it.

    Attributes:
        requests: how many there were, by kind: `PUT`, `PUT part`, `POST uploads`, `GET`, `HEAD`, ...
        log: kind and path of each of them.
        sent_bytes: of answers to ranged reads.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self.requests: Counter[str] = Counter()
        self.log: list[tuple[str, str]] = []
        self.sent_bytes = 0
        self._app = app
        self._lock = threading.Lock()
        self._rules: list[tuple[re.Pattern[str], int, Answer | float]] = []

    def fail(self, kind: str, answer: Answer | float, times: int = 1 << 30) -> None:
        """Lets the next requests fail whose kind and path, as `PUT part /checkpoints/run/x`, match.

        Args:
            answer: or how many seconds later a request is answered.
        """
        with self._lock:
            self._rules.append((re.compile(kind), times, answer))

    def heal(self) -> None:
        """Ends all failures."""
        with self._lock:
            self._rules.clear()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        kind, effect = _kind(environ), self._count(environ)
        if isinstance(effect, float):
            time.sleep(effect)
        elif effect is not None:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = b"" if kind == "HEAD" else _ERROR.format(effect[1]).encode()
            start(effect[0], [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        return self._app(environ, start)

    def _count(self, environ: dict[str, Any]) -> Answer | float | None:
        kind = _kind(environ)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", environ.get("HTTP_RANGE", "")):
            self.sent_bytes += int(wanted[2]) + 1 - int(wanted[1])
        with self._lock:
            self.requests[kind] += 1
            self.log.append((kind, environ["PATH_INFO"]))
            for n, (pattern, times, effect) in enumerate(self._rules):
                if times > 0 and pattern.search(f"{kind} {environ['PATH_INFO']}"):
                    self._rules[n] = (pattern, times - 1, effect)
                    return effect
        return None


def _kind(environ: dict[str, Any]) -> str:
    query = environ.get("QUERY_STRING", "")
    words = {"partNumber=": "part", "uploads": "uploads", "uploadId=": "upload", "list-type": "list"}
    for part, word in words.items():
        if part in query:
            return f"{environ['REQUEST_METHOD']} {word}"
    return str(environ["REQUEST_METHOD"])


@functools.cache
def served() -> tuple[ObjectStore, str]:
    """Returns the store of this process, and its address. It is served until the process ends.

    There is one, because the client keeps what it knows of a profile.
    """
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    store = ObjectStore(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, store, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return store, f"http://127.0.0.1:{server.server_port}"


def configure(path: Path, address: str) -> None:
    """Writes a configuration of the client that names the store; makes its bucket."""
    s3(address).create_bucket(Bucket=BUCKET)
    options = {
        "base_path": BUCKET,
        "endpoint_url": address,
        "region_name": "us-east-1",
        "multipart_threshold": 8 * MIB,
        "multipart_chunksize": 8 * MIB,
        "retries": {"mode": "standard", "total_max_attempts": 2},
    }
    profile = {
        "storage_provider": {"type": "s3", "options": options},
        "credentials_provider": {
            "type": "S3Credentials",
            "options": {"access_key": "test", "secret_key": "test"},
        },
        "retry": {"attempts": 2, "delay": 0.05, "backoff_multiplier": 1.0},
    }
    path.write_text(json.dumps({"profiles": {PROFILE: profile}}))


def s3(address: str) -> Any:
    """Returns a client of S3 itself, for what tests look at."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=address,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


def make_older(prefix: str, seconds: float) -> None:
    """Makes objects below a name of the bucket, and uploads to such names, so old; in this process's moto."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    bucket = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[BUCKET]
    then = datetime.datetime.now(datetime.UTC).replace(tzinfo=None) - datetime.timedelta(seconds=seconds)
    for key in list(bucket.keys.values()):
        if key.name.startswith(prefix):
            key.last_modified = then
    for upload in list(bucket.multiparts.values()):
        if upload.key_name.startswith(prefix):
            for part in upload.parts.values():
                part.last_modified = then


def begin_upload(name: str) -> str:
    """Begins an upload to a name of the bucket, sends one part of 5 MiB, and returns the upload's id."""
    client = s3(served()[1])
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=name)["UploadId"]
    client.upload_part(Bucket=BUCKET, Key=name, UploadId=upload, PartNumber=1, Body=bytes(5 * MIB))
    return str(upload)


def unfinished() -> list[str]:
    """Returns the names of the bucket that uploads which have not ended go to."""
    found = s3(served()[1]).list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    return sorted(one["Key"] for one in found)
