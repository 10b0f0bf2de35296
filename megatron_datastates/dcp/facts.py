"""What DCP knows of a checkpoint beyond our index: a small file that the manifest names.

It holds plain data, written by torch.save and read back with the allow list. A checkpoint without it, of
another program, reads as one whose keys were never nested.
"""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_datastates.errors import FormatError
from megatron_datastates.format.values import is_dcp_file_name
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.providers.objects import check_saved

_PROPERTIES: dict[str, type] = {
    "layout": torch.layout,
    "requires_grad": bool,
    "memory_format": torch.memory_format,
    "pin_memory": bool,
}
_VERSION = "1.0.0"  # of DCP's metadata, as its own writer says since torch 2.8


@dataclasses.dataclass(frozen=True)
class Facts:
    """What DCP's metadata have besides names, dtypes, shapes and chunks.

    Attributes:
        planner_data: of the save's planner; DCP's own has the path to each value in the nested state.
        properties: by key, fields of TensorProperties that do not have their default.
        storage_meta: fields of StorageMeta.
    """

    planner_data: Any = None
    properties: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    storage_meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    version: str | None = None

    @classmethod
    def of(cls, metadata: Metadata, storage_meta: StorageMeta) -> Facts:
        """Returns the facts in the metadata of a save."""
        tensors = metadata.state_dict_metadata.items()
        properties = {k: _unusual(v.properties) for k, v in tensors if isinstance(v, TensorStorageMetadata)}
        meta = {**vars(storage_meta), "checkpoint_id": str(storage_meta.checkpoint_id), "load_id": None}
        changed = {key: found for key, found in properties.items() if found}
        return cls(metadata.planner_data, changed, meta, _VERSION)

    def encode(self, name: str, *, trust: bool) -> bytes:
        """Returns the bytes of the file `name`. Raises UnsafeObjectError if a load would refuse them."""
        buffer = io.BytesIO()
        torch.save(vars(self), buffer)
        check_saved(buffer.getvalue(), name, trust=trust)
        return buffer.getvalue()

    def complete(self, properties: TensorProperties, key: str) -> None:
        """Sets the properties of a tensor that were not usual."""
        for name, value in self.properties.get(key, {}).items():
            found = getattr(torch, value, None) if isinstance(value, str) else value
            if name in _PROPERTIES and isinstance(found, _PROPERTIES[name]):
                setattr(properties, name, found)

    def stored_meta(self, load_id: str) -> StorageMeta:
        """Returns the StorageMeta of the save, for a load."""
        known = {field.name for field in dataclasses.fields(StorageMeta)}
        stored = {name: value for name, value in self.storage_meta.items() if name in known}
        return StorageMeta(**{**stored, "load_id": load_id})


def _unusual(properties: TensorProperties) -> dict[str, Any]:
    """Returns the fields without the default values; layouts and memory formats by their names in torch."""
    usual, found = TensorProperties(dtype=properties.dtype), {}
    for name in _PROPERTIES:
        value = getattr(properties, name)
        if value != getattr(usual, name):
            found[name] = value if isinstance(value, bool) else str(value).removeprefix("torch.")
    return found


def read_facts(checkpoint: Checkpoint) -> Facts:
    """Returns the facts of a checkpoint.

    Raises:
        CorruptDataError, FormatError, StorageError: the file is damaged or missing.
    """
    names = [other.name for other in checkpoint.manifest.others if is_dcp_file_name(other.name)]
    if not names:
        return Facts()
    stored = checkpoint.read_other_object(names[0])
    if not isinstance(stored, dict) or stored.keys() != {field.name for field in dataclasses.fields(Facts)}:
        raise _unknown(checkpoint, names[0])
    facts = Facts(**stored)
    properties = facts.properties.values() if isinstance(facts.properties, dict) else [None]
    if not all(isinstance(one, dict) for one in [facts.storage_meta, *properties]):
        raise _unknown(checkpoint, names[0])
    return facts


def _unknown(checkpoint: Checkpoint, name: str) -> FormatError:
    return FormatError(f"{checkpoint.directory / name} does not hold what DCP knows of a checkpoint")
