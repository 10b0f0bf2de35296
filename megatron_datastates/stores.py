"""Objects of object stores, through NVIDIA's multi-storage client: the only module that knows that package.

A path `msc://PROFILE/NAME` is an ObjectPath: a Path, so that code which joins names and opens files needs no
second form. Such a store has no directories, no renames and no half-written objects: an object appears
whole when its upload ends, or never. Listings may be late or paged, so nothing that decides whether a
checkpoint is complete uses them.

Belongs here: single requests, and the errors of the client as OSError. Does not belong here: what is
requested, and in which order (files.py for reading, pipeline/near/uploading.py for what a drain does).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, NoReturn, cast

from megatron_datastates.errors import OptionError, is_interrupt
from megatron_datastates.seekable import SeekableReads

SCHEME = "msc://"
_PREFIX = "msc:/"  # what is left of it in a Path
_URL = re.compile(r"msc:/+([^/]+)/*(.*)", re.DOTALL)
_PASSWORD = re.compile(r"[^\s/:@\"']+:[^\s/@\"']*@")  # and the user before it, in a URL
_SCHEME_IN_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # also what is left of a URL in a Path
_END_BYTES = 256 << 10  # read at once with the end of an object, where footers are
_NO_THREADS = "at interpreter shutdown"  # Python's refusal to start one
# Of a Path: what would go to the file system, and what object stores do not do. (Others call `open`.)
_REFUSED = (
    *("rename", "replace", "glob", "rglob", "walk", "touch", "rmdir", "chmod", "lchmod", "readlink"),
    *("symlink_to", "hardlink_to", "owner", "group", "copy", "copy_into", "move", "move_into"),
)
_OBJECT_MODE = stat.S_IFREG | 0o444


class ObjectPath(PosixPath):
    """The path of an object, or of all objects below a name. Its text is `msc://PROFILE/NAME`.

    What a Path does with a file is done with the object, or refused: nothing touches the file system.
    """

    def __str__(self) -> str:
        text = super().__str__()
        match = _URL.fullmatch(text)
        return f"{SCHEME}{match[1]}/{match[2]}".rstrip("/") if match else text  # of a parent of all profiles

    def __fspath__(self) -> str:
        return str(self)

    def absolute(self) -> ObjectPath:
        return self

    def resolve(self, strict: bool = False) -> ObjectPath:
        """Returns itself: an object store has no links."""
        return self

    def is_symlink(self) -> bool:
        return False

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Returns whether there is such an object; False where that cannot be asked."""
        with contextlib.suppress(OSError):
            size_of_object(self)
            return True
        return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Returns whether there are objects below this name; False where that cannot be asked."""
        with contextlib.suppress(OSError):
            return any(True for _ in _list(self))
        return False

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Returns whether there is such an object, or some below this name."""
        return self.is_file() or self.is_dir()

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Returns the size and time of an object. Raises OSError."""
        with _errors_of(self):
            client, key = _client(self)
            found = client.info(key, strict=False)
        at = found.last_modified.timestamp() if found.last_modified.year > datetime.MINYEAR else 0.0
        return os.stat_result((_OBJECT_MODE, 0, 0, 1, 0, 0, found.content_length, int(at), int(at), int(at)))

    def lstat(self) -> os.stat_result:
        """Returns what `stat` returns: there are no links."""
        return self.stat()

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: names need no directory."""

    def iterdir(self) -> Iterator[ObjectPath]:  # type: ignore[override]
        """Yields what is right below this name. Raises FileNotFoundError if there is nothing."""
        for name in names_below(self):
            yield self / name

    def read_bytes(self) -> bytes:
        """Returns all bytes of an object. Raises OSError."""
        return read_whole(self)

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes an object; no error if there is none. Raises OSError."""
        remove(self)

    def open(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Is refused: files.open_regular reads, and `write` and `upload` write."""
        raise self._unsupported("open")

    def _unsupported(self, what: str) -> OSError:
        return OSError(errno.EOPNOTSUPP, f"{what} is not done in object stores", str(self))


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: ObjectPath, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._unsupported(name)

    return refuse


for _name in _REFUSED:
    setattr(ObjectPath, _name, _refusal(_name))


def is_object(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path names something in an object store, in whatever form it is given."""
    return isinstance(path, ObjectPath) or os.fspath(path).startswith(_PREFIX)


def path_of(path: str | os.PathLike[str]) -> Path:
    """Returns a Path of the right kind for what a user has given to a command, an option or a call of ours.

    Raises:
        OptionError: it is empty, names an object store and no profile, or is a URL of another kind.
    """
    text = os.fspath(path)
    if not text:
        raise OptionError("expected a directory, found an empty path")
    scheme = _SCHEME_IN_PATH.match(text)
    if scheme is not None and scheme[0] != _PREFIX:
        raise OptionError(f"{text}: expected a directory, or msc://PROFILE/PATH of an object store")
    return any_path(path)


def any_path(path: str | os.PathLike[str]) -> Path:
    """Returns a Path of the right kind for what another program reads, which must not fail.

    A URL of another kind becomes a path at which there is nothing.

    Raises:
        OptionError: it names an object store and no profile.
    """
    text = os.fspath(path)
    if isinstance(path, ObjectPath) or not text.startswith(_PREFIX):
        return Path(path) if not isinstance(path, Path) else path
    if _URL.fullmatch(text) is None:
        raise OptionError(
            f"{text}: expected msc://PROFILE/PATH, with a profile of the client's configuration"
        )
    return ObjectPath(path)


# -- requests ---------------------------------------------------------------------------------------------
# All raise OSError with an errno and the object's name: ENOENT if there is no such object, EACCES if the
# store refuses the credentials, EIO for all that the client has given up.


def size_of_object(path: Path) -> int:
    """Returns the size of an object in bytes, by a request for that object alone."""
    return path.stat().st_size


def require_answer(path: Path) -> None:
    """Makes one request, for a listing: what is configured wrong shows at once.

    Raises:
        OptionError: the profile cannot be used.
        OSError: the store refuses the credentials, has no such bucket, or does not answer.
    """
    next(_list(path), None)


def read(path: Path, offset: int, count: int) -> bytes:
    """Returns a range of an object's bytes. OSError also if the object ends before the range does."""
    if count == 0:
        return b""
    with _errors_of(path):
        from multistorageclient.types import Range

        client, key = _client(path)
        data = cast(bytes, client.read(key, byte_range=Range(offset=offset, size=count)))
    if len(data) != count:
        raise OSError(errno.EIO, f"expected {count} bytes at {offset}, found {len(data)}", str(path))
    return data


def read_whole(path: Path) -> bytes:
    """Returns all bytes of an object, past any cache of the client: other programs replace it."""
    with _errors_of(path):
        from multistorageclient.types import SourceVersionCheckMode

        client, key = _client(path)
        return bytes(client.read(key, check_source_version=SourceVersionCheckMode.ENABLE))


def write(path: Path, data: bytes) -> None:
    """Makes an object, or replaces it, in one request."""
    with _errors_of(path):
        client, key = _client(path)
        client.write(key, data)


def upload(path: Path, source: BinaryIO) -> None:
    """Makes an object of a file, in parts if it is large; the client sends failed parts again.

    Args:
        source: seekable. It is read in order, and again from its begin if the client begins again.
    """
    with _errors_of(path):
        client, key = _client(path)
        try:
            client.upload_file(key, source)
        except Exception as error:
            settings: Any = getattr(getattr(client, "_storage_provider", None), "_transfer_config", None)
            if _NO_THREADS not in str(error) or not getattr(settings, "use_threads", False):
                raise
            settings.use_threads = False  # one part at a time: the interpreter is ending
            source.seek(0)
            client.upload_file(key, source)


def copy(source: Path, target: Path) -> None:
    """Copies an object within one profile, without its bytes passing through here."""
    with _errors_of(target):
        client, key = _client(source)
        other, target_key = _client(target)
        if client is not other:
            raise OSError(errno.EXDEV, "it is of another profile", str(target))
        client.copy(key, target_key)


def remove(path: Path) -> None:
    """Removes an object; no error if there is none."""
    with _errors_of(path):
        client, key = _client(path)
        client.delete_many([key])


def remove_all(directory: Path, names: Sequence[str]) -> None:
    """Removes objects below a path, given their names below it, in few requests; no error for missing."""
    with _errors_of(directory):
        client, key = _client(directory)
        client.delete_many([f"{key}/{name}" if key else name for name in names])


def remove_below(path: Path) -> None:
    """Removes all objects below a path that a listing shows now."""
    remove_all(path, [one.name for one in all_below(path)])


def names_below(path: Path) -> list[str]:
    """Returns the names right below a path, in order, as a listing shows them now.

    Raises FileNotFoundError if there is nothing.
    """
    names = sorted({name for name, _ in _list(path)})
    if not names:
        raise FileNotFoundError(errno.ENOENT, "there is no object below", str(path))
    return names


def folders_below(path: Path) -> list[str]:
    """Returns the names right below a path that have objects below them, in order; perhaps none."""
    return sorted({name for name, is_folder in _list(path) if is_folder})


@dataclasses.dataclass(frozen=True)
class Listed:
    """An object as a listing shows it."""

    name: str  # below the path that is listed
    bytes: int
    changed_at: float  # by the store's clock, in seconds as time.time() has them


def objects_below(path: Path) -> list[Listed]:
    """Returns the objects right below a path, in order, as a listing shows them now; perhaps none."""
    return [one for one in all_below(path) if "/" not in one.name]


def all_below(path: Path) -> list[Listed]:
    """Returns the objects below a path, at any depth, in order, as a listing shows them now; perhaps none."""
    with _errors_of(path):
        client, key = _client(path)
        prefix = f"{key}/" if key else ""
        found = [
            Listed(
                one.key.removeprefix("/").removeprefix(prefix),
                one.content_length,
                one.last_modified.timestamp(),
            )
            for one in client.list(path=prefix)
        ]
    return sorted(found, key=lambda one: one.name)


def _list(path: Path) -> Iterator[tuple[str, bool]]:
    with _errors_of(path):
        client, key = _client(path)
        prefix = f"{key}/" if key else ""
        for found in client.list(path=prefix, include_directories=True):
            name = found.key.strip("/")
            if name not in ("", key):  # the object of the folder itself, which web consoles create
                yield name.removeprefix(prefix), found.type == "directory"


class ObjectFile(SeekableReads):
    """An object, open for reading. Its end is read at once with the first bytes that are wanted of it."""

    def __init__(self, path: Path) -> None:
        super().__init__(size_of_object(path))
        self._path = path
        self._end = b""

    def read_at(self, offset: int, target: memoryview) -> int:
        end_begin = max(self.size - _END_BYTES, 0)
        if offset < end_begin:
            target[:] = read(self._path, offset, len(target))
            return len(target)
        if not self._end:
            self._end = read(self._path, end_begin, self.size - end_begin)
        target[:] = self._end[offset - end_begin :][: len(target)]
        return len(target)


# -- the client -------------------------------------------------------------------------------------------


def _client(path: Path) -> tuple[Any, str]:
    """Returns the client of a path's profile, and the name in it."""
    try:
        import multistorageclient
    except ImportError as error:
        raise OptionError(
            f"{path}: msc:// paths need the package multi-storage-client, with the extra of the store, such "
            f"as multi-storage-client[boto3] ({error})"
        ) from error
    try:
        return cast("tuple[Any, str]", multistorageclient.resolve_storage_client(str(path)))
    except Exception as error:  # the client has no class of its own for a configuration that it cannot use
        file = os.environ.get("MSC_CONFIG") or "its configuration file, which MSC_CONFIG may name"
        raise OptionError(
            f"{path}: the multi-storage client cannot use this profile of {file}: {_without_secrets(error)}"
        ) from None  # its text may show secrets


def _without_secrets(error: Exception) -> str:
    """Returns what a configuration's error says, without values of the configuration."""
    places = [where for one in error.args if (where := getattr(one, "json_path", None))]
    if places:
        return f"unexpected value at {', '.join(places)}"
    return f"{type(error).__name__}: {_without_password(error)}"


def _without_password(error: BaseException) -> str:
    return _PASSWORD.sub("***@", str(error))


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turns the client's errors into OSErrors with an errno and the object's name."""
    try:
        yield
    except OptionError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(path)) from error
    except PermissionError as error:
        raise PermissionError(
            errno.EACCES, f"the object store refuses it ({_without_password(error)})", str(path)
        ) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(errno.EIO, _without_password(error), str(path)) from error
    except BaseException as error:  # RuntimeError, RetryableError, the store's own library's; Rust's panics
        if is_interrupt(error):
            raise
        reason = f"{type(error).__name__}: {_without_password(error)}"
        raise OSError(errno.EIO, reason, str(path)) from error


# -- what killed uploads leave ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Upload:
    """An upload in parts that has not ended."""

    path: Path
    upload_id: str
    bytes: int  # of the parts that are there
    changed_at: float  # when it began or, if it has parts, when the last one came; by the store's clock


def uploads_below(path: Path) -> list[Upload]:
    """Returns the uploads to names below a path that have not ended.

    The multi-storage client has no call for this, so it asks the client of S3 that is in it.

    Raises:
        OSError: EOPNOTSUPP if the path is not in S3, or is in a store that is reached in another way.
    """
    with _errors_of(path):
        s3, bucket, key = _s3(path)
        prefix = f"{key.rstrip('/')}/" if key else ""
        found = []
        for page in s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
            for one in page.get("Uploads", []):
                pages = s3.get_paginator("list_parts").paginate(
                    Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"]
                )
                with contextlib.suppress(s3.exceptions.NoSuchUpload):  # it has ended meanwhile
                    parts = [part for some in pages for part in some.get("Parts", [])]
                    at = max([one["Initiated"], *(part["LastModified"] for part in parts)]).timestamp()
                    name = path / one["Key"].removeprefix(prefix)
                    found.append(Upload(name, one["UploadId"], sum(part["Size"] for part in parts), at))
        return found


def abort(upload: Upload) -> None:
    """Ends an upload and removes its parts; no error if it has ended."""
    with _errors_of(upload.path):
        s3, bucket, key = _s3(upload.path)
        with contextlib.suppress(s3.exceptions.NoSuchUpload):
            s3.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload.upload_id)


def _s3(path: Path) -> tuple[Any, str, str]:
    """Returns the client of S3 itself, the bucket, and the object's key in it."""
    client, name = _client(path)
    provider = getattr(client, "_storage_provider", None)
    s3, base = getattr(provider, "_s3_client", None), getattr(provider, "_base_path", "")
    if s3 is None:
        raise OSError(errno.EOPNOTSUPP, "uploads that have not ended are listed in S3 alone", str(path))
    bucket, _, prefix = base.strip("/").partition("/")
    return s3, bucket, f"{prefix}/{name}" if prefix else name
