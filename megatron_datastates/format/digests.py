"""The content digest of a data file: the same for equal state, whichever save wrote it."""

from __future__ import annotations

import hashlib

from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.values import BLOCK_BYTES


class ContentDigest:
    """SHA-256 over the SHA-256s of a file's blocks of 1 MiB, the first of which is without the header."""

    def __init__(self) -> None:
        self._blocks, self._block = hashlib.sha256(), hashlib.sha256()
        self._filled = HEADER_BYTES  # of the block, the header included

    def update(self, data: bytes | memoryview) -> None:
        """Adds the file's next bytes; the first are those after the header."""
        rest = memoryview(data)
        while rest:
            part = rest[: BLOCK_BYTES - self._filled]
            self._block.update(part)
            self._filled, rest = self._filled + len(part), rest[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def hexdigest(self) -> str:
        """Returns the digest of all bytes added, which ends a block that is not full: call it once."""
        if self._filled:
            self._end_block()
        return self._blocks.hexdigest()

    def _end_block(self) -> None:
        self._blocks.update(self._block.digest())
        self._block, self._filled = hashlib.sha256(), 0
