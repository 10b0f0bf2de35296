"""The small files that the data files of a save are published with.

What belongs here: making these from a finished save. What does not: writing them (directory_publisher.py).
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from megatron_datastates.errors import some_of
from megatron_datastates.format.directory import iteration_in_name
from megatron_datastates.format.features import COMPATIBLE_CHECKSUMS
from megatron_datastates.format.manifest import Manifest, OtherFile
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.publishing.directory_publisher import SmallFiles
from megatron_datastates.pipeline.publishing.layouts import LayoutStore
from megatron_datastates.pipeline.publishing.presence import named_after_save, other_file_entry
from megatron_datastates.pipeline.runs.branches import Origin
from megatron_datastates.pipeline.saving.rank_save import RankSave
from megatron_datastates.pipeline.saving.records import Records

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicationExtras:
    """What a manifest and its directory hold besides our data files."""

    parallel: dict[str, int] = dataclasses.field(default_factory=dict)
    # Written into the directory by others before the save; the manifest names them.
    other_files: tuple[str, ...] = ()
    # Patterns of files of a checkpoint in another format that this one replaces.
    superseded: tuple[str, ...] = ()
    metadata: bytes = b""  # see SmallFiles
    origin: Origin | None = None  # what the job resumed from, if that is known
    # Makes what DCP knows of the state (dcp/facts.py), for a file of its own; called where that is published.
    dcp_facts: Callable[[], bytes] | None = None


def _warn_of_less(directory: Path, left_out: Sequence[str]) -> None:
    """Logs what the run's checkpoint before had and this one lacks: a load would notice it weeks later."""
    if left_out:
        logger.warning(
            "the checkpoint %s lacks tensors that the one before it had: %s",
            directory,
            some_of([repr(key) for key in left_out], 3),
        )


def small_files(
    save: RankSave,
    records: Records,
    layouts: LayoutStore,
    extras: PublicationExtras,
    written_as: Mapping[int, SaveId],
) -> SmallFiles:
    """Returns the manifest and the index of all ranks' files. On rank 0.

    Args:
        written_as: the save ids of ranks' own files, if not the save's.

    Raises:
        FormatError: ranks disagree on a tensor, or their fragments leave holes in it or overlap.
        UnsafeObjectError: a load would refuse a file that others have written.
        OSError: such a file cannot be read.
    """
    context = save.context
    facts = {context.save_id.dcp_file_name(): extras.dcp_facts()} if extras.dcp_facts is not None else {}
    ancestors = None if extras.origin is None else extras.origin.ancestors
    index = layouts.merged(records)
    if iteration_in_name(context.directory.name) is not None:
        _warn_of_less(context.directory, layouts.left_out(context.directory.parent, index))
    manifest = Manifest(
        run_id=f"{context.save_id.run_id:016x}",
        ordinal=context.save_id.ordinal,
        world_size=context.world_size,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        index=named_after_save(index.entry, context.save_id),
        files=records.file_entries(context.save_id, written_as),
        iteration=context.iteration,
        ancestors=msgspec.UNSET if ancestors is None else ancestors,
        parallel=extras.parallel,
        others=[*_others(save, extras), *(OtherFile.of(name, data) for name, data in facts.items())],
        writer=releases(),
        compatible=COMPATIBLE_CHECKSUMS,
        providers=layouts.providers(records),
    )
    return SmallFiles(manifest, index.encoded, extras.metadata, facts)


def _others(save: RankSave, extras: PublicationExtras) -> list[OtherFile]:
    paths = [save.context.directory / name for name in extras.other_files]
    return [other_file_entry(path, save.check_object) for path in paths if path.is_file()]


@functools.cache  # searching for installed packages takes 2 ms, with the GIL, in every save
def releases() -> dict[str, str]:
    """Returns the releases of the libraries involved, for the manifest; always the same object."""
    found = {}
    for name in ("megatron-datastates", "megatron-core", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
