"""Objects as saves store them, and archives made by hand."""

from __future__ import annotations

import io
import zipfile
from typing import Any

from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.objects import ObjectSource

# A numpy dtype with fields of several kinds.
STRUCTURED = [
    ("a", "i4"),
    ("b", "U3", (2,)),
    ("c", [("d", "M8[us]")]),
]


def stored(value: Any) -> bytes:
    """Returns the bytes that a save stores."""
    return ObjectSource("key", value, Mutability.NEVER).serialize()


def archive(pickled: bytes, compression: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    """Returns an archive as torch.save makes it, with this pickle and these storages."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        for name, data in members.items():
            file.writestr(f"archive/data/{name}", data)
    return buffer.getvalue()
