"""Manifests with a valid checksum and false contents."""

from __future__ import annotations

import json
import zlib

import msgspec
import pytest

from megatron_datastates.errors import FormatError, UnsupportedFormatError
from megatron_datastates.format.manifest import (
    FileEntry,
    IndexEntry,
    Manifest,
    OtherFile,
    ProviderEntry,
)
from megatron_datastates.format.values import MANIFEST_NAME, SaveId, is_data_file_name, is_own_file_name
from tests.unit.test_codecs import manifest

GOOD = json.loads(manifest().encode().split(b"\n", 1)[1])
DATA_NAME = "data-00001-0123456789abcdef-3.bin"


def enveloped(body: bytes, version: bytes = b"2") -> bytes:
    return b"datastates-manifest %s %d %08x\n" % (version, len(body), zlib.crc32(body)) + body


def decode(fields: object) -> Manifest:
    return Manifest.decode(enveloped(json.dumps(fields).encode()), "it")


def with_file(**changes: object) -> Manifest:
    entry = msgspec.structs.replace(manifest().files[0], **changes)
    return msgspec.structs.replace(manifest(), files=[entry])


def refuse(wrong: Manifest, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        Manifest.decode(wrong.encode(), "it")


def test_a_manifest_is_readable_text():
    lines = manifest().encode().decode().splitlines()
    assert lines[0].startswith("datastates-manifest 2 ")
    assert ' "iteration": 100,' in lines


@pytest.mark.parametrize(
    "name",
    [
        "../" + DATA_NAME, "/" + DATA_NAME, "a/" + DATA_NAME, DATA_NAME + "/..", DATA_NAME + "\0",
        "\0" + DATA_NAME, DATA_NAME + "\n", "", ".", "..", "/etc/passwd", "datastates.manifest",
        "data-1-0123456789abcdef-3.bin", "data-00001-0123456789ABCDEF-3.bin",
        "data-٠٠٠٠١-0123456789abcdef-3.bin",
    ],
)  # fmt: skip
def test_a_data_file_of_any_other_name_is_refused(name):
    assert is_data_file_name(DATA_NAME)
    assert not is_data_file_name(name)
    refuse(with_file(name=name), "data file name")


@pytest.mark.parametrize(
    "name",
    ["../index-" + "0" * 32, "/index-" + "0" * 32, "index-" + "0" * 32 + "\0", "index-1", "", DATA_NAME],
)
def test_an_index_of_any_other_name_is_refused(name):
    refuse(msgspec.structs.replace(manifest(), index=IndexEntry(name, 1, 1, "0" * 64)), "index name")


@pytest.mark.parametrize("sha256", ["", "1" * 64, "0" * 31])
def test_an_index_named_after_another_hash_is_refused(sha256):
    refuse(
        msgspec.structs.replace(manifest(), index=IndexEntry("index-" + "0" * 32, 1, 1, sha256)), "index name"
    )


@pytest.mark.parametrize(("size", "directory"), [(8, 9), (8, 0), (8, -1), (-1, -1), (0, 0)])
def test_an_impossible_index_is_refused(size, directory):
    name, sha256 = manifest().index.name, manifest().index.sha256
    refuse(
        msgspec.structs.replace(manifest(), index=IndexEntry(name, size, directory, sha256)),
        f"entry of {name}",
    )


@pytest.mark.parametrize("name", ["../metadata.json", "/metadata.json", "a/b", "", ".", "..", "a\0"])
def test_another_file_outside_the_directory_is_refused(name):
    refuse(msgspec.structs.replace(manifest(), others=[OtherFile(name, 1, "0" * 64)]), "file name")


@pytest.mark.parametrize(
    "changes",
    [
        {"bytes": 0}, {"bytes": -1}, {"footer_offset": -4096}, {"footer_offset": 8192},
        {"footer_offset": 2**70}, {"footer_offset": 2**70, "bytes": 2**71}, {"rank": -1}, {"rank": 2},
    ],
    ids=str,
)  # fmt: skip
def test_an_impossible_data_file_is_refused(changes):
    refuse(with_file(**changes), f"entry of {DATA_NAME}")


def test_a_data_file_named_twice_is_refused():
    entry = FileEntry(DATA_NAME, 1, 8192, 4096, 7)
    refuse(msgspec.structs.replace(manifest(), files=[entry, entry]), "twice")


def test_data_files_in_another_order_than_that_of_ranks_are_refused():
    """The index counts them by their place: each tensor would be read from another rank's file."""
    entry = manifest().files[0]
    others = [
        msgspec.structs.replace(entry, name=f"data-0000{n}-0123456789abcdef-3.bin", rank=n) for n in (1, 0)
    ]
    wrong = msgspec.structs.replace(manifest(), files=others, world_size=2)
    refuse(wrong, "order of ranks")
    in_order = msgspec.structs.replace(wrong, files=others[::-1])
    assert Manifest.decode(in_order.encode(), "it") == in_order


@pytest.mark.parametrize(
    "run_id", ["", "1", "0" * 17, "0123456789ABCDEF", "0x23456789abcdef", "../../../../etc."]
)
def test_a_malformed_run_id_is_refused(run_id):
    refuse(msgspec.structs.replace(manifest(), run_id=run_id), "save id")


@pytest.mark.parametrize("ordinal", [0, -1, 2**64])
def test_an_impossible_ordinal_is_refused(ordinal):
    refuse(msgspec.structs.replace(manifest(), ordinal=ordinal), "save id")


@pytest.mark.parametrize("field", ["run_id", "ordinal", "world_size", "created", "index", "files"])
def test_a_missing_field_is_refused_and_named(field):
    with pytest.raises(FormatError, match=field):
        decode({key: value for key, value in GOOD.items() if key != field})


@pytest.mark.parametrize("field", sorted(set(GOOD) - {"iteration"}))
def test_a_field_of_another_type_is_refused_and_named(field):
    with pytest.raises(FormatError, match=field):
        decode(GOOD | {field: None})


def test_unknown_fields_are_ignored():
    assert decode(GOOD | {"later": {"a": [1]}}) == manifest()


def test_absent_optional_fields_have_defaults():
    required = ("run_id", "ordinal", "world_size", "created", "index", "files")
    least = decode({key: GOOD[key] for key in required})
    assert (least.iteration, least.parallel, least.others, least.format_version) == (None, {}, [], 2)
    assert least.providers == []


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"run_id": "\xff"}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"ordinal": 1e400}', b'{"run_id": "\\ud800"}', b"{}trailing",
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_a_body_that_is_not_its_json_is_refused(body):
    with pytest.raises(FormatError, match="not a valid manifest"):
        Manifest.decode(enveloped(body), "it")


def test_a_later_version_is_refused_before_its_fields_are_decoded():
    with pytest.raises(UnsupportedFormatError, match="update"):
        Manifest.decode(enveloped(b'{"entirely": "different"}', version=b"3"), "it")


def test_the_first_line_says_which_version_it_is():
    """In a manifest of format 1 whose JSON does not say it, too."""
    fields = {key: value for key, value in GOOD.items() if key != "format_version"}
    found = Manifest.decode(enveloped(json.dumps(fields).encode(), version=b"1"), "it")
    assert found.format_version == 1
    assert found == msgspec.structs.replace(manifest(), format_version=1)


SHARED = {
    "name": "data-00001.7-00000000000000ff-2.bin", "save_id": "00000000000000ff-2", "group": 7,
    "content_sha256": "a" * 64,
}  # fmt: skip


def test_a_data_file_may_be_of_an_earlier_save_and_of_any_group():
    shared = with_file(**SHARED)
    found = Manifest.decode(shared.encode(), "it")
    assert found == shared
    assert found.file_save_id(found.files[0]) == SaveId(255, 2)
    assert manifest().file_save_id(manifest().files[0]) == manifest().save_id


@pytest.mark.parametrize(
    "lie",
    [
        {"save_id": "00000000000000ff-3"}, {"save_id": ""}, {"save_id": "ff-2"}, {"group": 0}, {"group": 8},
        {"save_id": "00000000000000ff-02"}, {"save_id": "00000000000000ff-0"}, {"save_id": "../../secret"},
        {"group": -7}, {"name": DATA_NAME}, {"content_sha256": "a" * 63}, {"content_sha256": "A" * 64},
        {"group": 100, "name": "data-00001.100-00000000000000ff-2.bin"},
        {"save_id": f"00000000000000ff-{2**64}", "name": f"data-00001.7-00000000000000ff-{2**64}.bin"},
    ],
    ids=str,
)  # fmt: skip
def test_an_entry_that_contradicts_its_name_is_refused(lie):
    refuse(with_file(**(SHARED | lie)), "data file name|not a save id|SHA-256")


def test_two_files_of_one_group_of_a_rank_are_refused():
    one, other = manifest().files[0], with_file(**SHARED).files[0]
    both = msgspec.structs.replace(manifest(), files=[one, other])
    assert Manifest.decode(both.encode(), "it") == both
    refuse(msgspec.structs.replace(both, files=[other, one]), "order of ranks and groups")
    same = {"group": 0, "name": "data-00001-00000000000000ff-2.bin"}
    refuse(msgspec.structs.replace(both, files=[one, with_file(**(SHARED | same)).files[0]]), "one group")


def test_a_key_belongs_to_the_provider_with_the_longest_name():
    names = ["", "model", "model.vision", "data"]
    providers = [ProviderEntry(name, "Named", {"cast_from": "float32"}) for name in names]
    found = msgspec.structs.replace(manifest(), providers=providers)
    assert Manifest.decode(found.encode(), "it") == found
    for key, name in {
        "model": "model", "model.a": "model", "model.vision.b.c": "model.vision", "model.visions": "model",
        "models.a": "", "data": "data", "": "", ".": "", "a.model": "",
    }.items():  # fmt: skip
        assert found.provider_of(key).name == name, key
    assert manifest().provider_of("model") is None
    refuse(msgspec.structs.replace(found, providers=providers[:1] * 2), "provider is named twice")


@pytest.mark.parametrize(
    "line",
    [
        b"datastates-manifest 1 0 00000000",
        b"datastates-manifest 1  0 00000000\n",
        b"datastates-manifest 9999999999 0 00000000\n",
        b"Datastates-manifest 1 0 00000000\n",
    ],
)
def test_a_malformed_first_line_is_refused(line):
    with pytest.raises(FormatError, match="does not begin"):
        Manifest.decode(line, "it")


def test_only_names_of_our_own_files_are_left_overs():
    ours = [
        DATA_NAME,
        "index-" + "0" * 32,
        "dcp-" + "0" * 16 + "-1.pt",
        ".datastates-datastates.manifest.tmp",
    ]
    others = [
        "metadata.json",
        "common.pt",
        "dcp-1.pt",
        ".metadata",
        "__0_0.distcp",
        "data-00001.bin",
        "index-0",
    ]
    others += ["x" + DATA_NAME, "datastates.manifest", ".datastates-.tmp/x", DATA_NAME + ".bak"]
    assert all(is_own_file_name(name) for name in ours)
    assert not any(is_own_file_name(name) for name in others)


def test_the_names_of_saves_differ_by_run_ordinal_and_rank():
    names = {SaveId(run, n).data_file_name(rank) for run in (1, 2) for n in (1, 2) for rank in (0, 1)}
    assert len(names) == 8
    assert all(is_data_file_name(name) for name in names)


def test_a_save_follows_earlier_files_of_its_own_run_only():
    save = SaveId(7, 5)
    assert save.follows(SaveId(7, 4).data_file_name(3))
    assert save.follows(f".datastates-{MANIFEST_NAME}-{SaveId(7, 4)}.tmp")
    for other in (SaveId(7, 5), SaveId(7, 6), SaveId(8, 4)):
        assert not save.follows(other.data_file_name(3))
    assert not save.follows("index-" + "0" * 32)
