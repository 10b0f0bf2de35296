"""What rank 0 reads of all ranks' records, in columns."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_datastates.format.manifest import FileEntry
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.saving.records import STABLE_GROUP, RankRecord, Records

SAVE, OTHER = SaveId(0xA, 7), SaveId(0xA, 8)


def record(rank: int, *, bytes: int = 0, providers: str = "", **stable: Any) -> RankRecord:
    return RankRecord(
        rank,
        bytes > 0,
        bytes,
        bytes // 2,
        rank,
        b"%016d" % rank,
        0,
        *[0.5] * 7,
        providers_digest=(16 * providers).encode(),
        **stable,
    )


def stable_file(ordinal: int) -> dict[str, Any]:
    return {
        "stable_file_bytes": 4096,
        "stable_footer_offset": 512,
        "stable_footer_crc": 9,
        "stable_layout_digest": 16 * b"s",
        "stable_ordinal": ordinal,
        "stable_content_sha256": bytes([ordinal]) * 32,
    }


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    """Of ranks with one file, with none, with a file of stable tensors of an earlier save, and with two."""

    def unexpected(data: bytes) -> RankRecord:
        raise AssertionError("a record is decoded: at many ranks, that takes long")

    found = Records.of(
        [
            record(0, bytes=8192, providers="p"),
            record(1, providers="q"),
            record(2, **stable_file(3)),
            record(3, bytes=16384, providers="p", **stable_file(7)),
        ]
    )
    monkeypatch.setattr(RankRecord, "decode", unexpected)
    return found


def test_a_manifest_has_the_entries_of_all_data_files_in_the_order_of_ranks_and_groups(
    records: Records,
) -> None:
    assert records.file_entries(SAVE, {}) == [
        FileEntry("data-00000-000000000000000a-7.bin", 0, 8192, 4096, 0),
        FileEntry(
            "data-00002.1-000000000000000a-3.bin",
            2,
            4096,
            512,
            9,
            save_id="000000000000000a-3",
            group=STABLE_GROUP,
            content_sha256="03" * 32,
        ),
        FileEntry("data-00003-000000000000000a-7.bin", 3, 16384, 8192, 3),
        FileEntry(
            "data-00003.1-000000000000000a-7.bin",
            3,
            4096,
            512,
            9,
            group=STABLE_GROUP,
            content_sha256="07" * 32,
        ),
    ]


def test_files_that_ranks_have_written_as_another_save_are_named_so(records: Records) -> None:
    (first, *_) = records.file_entries(SAVE, dict.fromkeys(range(4), OTHER))
    assert (first.name, first.save_id) == ("data-00000-000000000000000a-8.bin", "000000000000000a-8")


def test_layouts_are_those_of_the_files(records: Records) -> None:
    assert records.layouts() == [(0, b"%016d" % 0), (2, b"s" * 16), (3, b"%016d" % 3), (3, b"s" * 16)]


def test_lists_of_providers_are_named_once_in_the_order_of_ranks(records: Records) -> None:
    assert records.providers_digests() == [b"p" * 16, b"q" * 16, bytes(16)]
