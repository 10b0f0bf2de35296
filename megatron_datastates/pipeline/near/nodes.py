"""Which nodes wrote a save to their near tiers: the file nodes.json beside its data files.

Nothing here imports torch or the native module.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatron_datastates.files import MANIFEST_BYTES, read_regular

NODES_NAME = "nodes.json"


class NodeEntry(msgspec.Struct):
    """One node that has files of a save in its near tier."""

    name: str
    ranks: list[int]  # whose files they are


class Nodes(msgspec.Struct):
    """Which nodes wrote a save to near tiers; stored with it on each."""

    own: int  # which of them this node is
    nodes: list[NodeEntry]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


_NODES = msgspec.json.Decoder(Nodes)  # made at import, as in manifest.py


def nodes_in(folder: Path) -> Nodes | None:
    """Returns which nodes wrote the save in a folder of a near tier; None if it does not say so."""
    try:
        nodes = _NODES.decode(read_regular(folder / NODES_NAME, MANIFEST_BYTES))
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
        return None
    return nodes if 0 <= nodes.own < len(nodes.nodes) else None
