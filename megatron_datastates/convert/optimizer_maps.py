"""Optimizer maps beside a checkpoint of torch_dist, which has no place for them: conversion back needs them.

They are in a file of their own, which Megatron does not look at: as objects they would be unexpected keys.
The file has the SHA-256 of DCP's index, so that another checkpoint that is saved there has no maps.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from megatron_datastates.errors import FormatError
from megatron_datastates.files import METADATA_BYTES, OBJECT_BYTES, read_regular
from megatron_datastates.format.directory import OPTIMIZER_MAPS_NAME, TORCH_DIST_INDEX
from megatron_datastates.format.values import is_optimizer_map


def encode_maps(maps: Mapping[str, bytes], dcp_index: bytes) -> bytes:
    """Returns the file's bytes.

    Args:
        maps: objects by key, as they are stored.
        dcp_index: the content of `.metadata`.
    """
    found = {key: base64.b64encode(data).decode() for key, data in maps.items()}
    return json.dumps({"index_sha256": hashlib.sha256(dcp_index).hexdigest(), "maps": found}).encode()


def read_maps(directory: Path) -> dict[str, bytes]:
    """Returns the optimizer maps of a checkpoint of torch_dist: none if the file is missing, or of another.

    Raises:
        FormatError: the file is damaged.
    """
    path = directory / OPTIMIZER_MAPS_NAME
    try:
        document = json.loads(read_regular(path, OBJECT_BYTES))
        digest = hashlib.sha256(read_regular(directory / TORCH_DIST_INDEX, METADATA_BYTES)).hexdigest()
        if document["index_sha256"] != digest:
            return {}
        maps = {key: base64.b64decode(data, validate=True) for key, data in document["maps"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"{path} is damaged: {error!r}; remove it to do without optimizer maps") from error
    strange = next((key for key in maps if not is_optimizer_map(key)), None)
    if strange is not None:
        raise FormatError(f"{path} is damaged: {strange!r} is not the key of an optimizer map")
    return maps
