"""Megatron's `integrity.json`: SHA-256 sums of a checkpoint's files, which `--verify-integrity` compares.

What belongs here: reading the sums, and those of a checkpoint that was rewritten. Checks that a command
makes of a checkpoint: integrity.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from megatron_datastates.errors import CorruptDataError, FormatError
from megatron_datastates.files import DOCUMENT_BYTES, read_regular, sha256_of
from megatron_datastates.format.directory import INTEGRITY_NAME

_ALGORITHM = "sha256"


def stored_sums(directory: Path) -> dict[str, str] | None:
    """Returns the sums of a checkpoint, by the names of its files; None if it has none.

    Raises:
        FormatError: `integrity.json` is damaged, or has sums of another kind.
        OSError: it cannot be read.
    """
    path = directory / INTEGRITY_NAME
    try:
        document = json.loads(read_regular(path, DOCUMENT_BYTES))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is damaged: {error}") from error
    files = document.get("files") if isinstance(document, dict) else None
    kind = document.get("algorithm", _ALGORITHM) if isinstance(document, dict) else None
    if (
        kind != _ALGORITHM
        or not isinstance(files, dict)
        or not all(isinstance(s, str) for s in files.values())
    ):
        raise FormatError(f"{path} is damaged: expected {_ALGORITHM} sums by names of files")
    return files


def require_sums(directory: Path, sums: Mapping[str, str], names: Iterable[str]) -> None:
    """Checks files against their sums, as far as there are any, before what is in them gets other sums.

    Raises:
        CorruptDataError: a file differs.
        OSError: it cannot be read.
    """
    for name in names:
        if name in sums and (found := sha256_of(directory / name)) != sums[name]:
            raise CorruptDataError(
                f"{directory / name} has SHA-256 {found}, expected {sums[name]} by {INTEGRITY_NAME}"
            )


def encode_sums(sums: Mapping[str, str]) -> bytes:
    """Returns `integrity.json` with these sums."""
    return json.dumps({"algorithm": _ALGORITHM, "files": dict(sorted(sums.items()))}, indent=2).encode()


def renewed_sums(directory: Path, sums: Mapping[str, str], renewed: Collection[str]) -> dict[str, str]:
    """Returns the sums of a checkpoint in which files were replaced.

    Args:
        sums: of the checkpoint as it was; what is not there any more is left out.
        renewed: names of files that are new or have changed.

    Raises:
        OSError: one cannot be read.
    """
    kept = {
        name: found for name, found in sums.items() if name not in renewed and (directory / name).exists()
    }
    return kept | {name: sha256_of(directory / name) for name in renewed}
