"""Checkpoints of released formats: this release reads them bit for bit, and writes the last one as it was.

If a test here fails, users' checkpoints have become unreadable, or older releases cannot read new ones:
correct the code, never the golden files.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch

from megatron_datastates.errors import FormatError
from megatron_datastates.format.footer import Footer
from megatron_datastates.format.header import HEADER_BYTES, Header
from megatron_datastates.format.index import Index
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.tail import Kind
from megatron_datastates.format.values import DTYPES, MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.near.nodes import nodes_in
from megatron_datastates.pipeline.runs.jobs import jobs_in
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import CopyBudget, Mutability, Write
from tests.golden import make_golden as made
from tests.unit.states import bits

HERE = Path(__file__).parent
GOLDEN_SHA256 = {
    "format-1": "d341183d41286b09f91185b9a83018d38cb0bd8a521989c157e06bf14e842c7f",
    "format-2": "829796fd5d79a73088708e8a9927eab13632f88cde5cf0cfe8d596f771bcf824",
}
FORMATS = [HERE / name for name in GOLDEN_SHA256]
LAST = FORMATS[-1]  # the one that is written
KEYS = [key for key in made.SHAPES if key not in DTYPES or hasattr(torch, key)]  # older torches have fewer
DATA_FILES = sorted(path for each in FORMATS for path in each.glob("*/data-*.bin"))
OF_ALL_FORMATS = pytest.mark.parametrize("each", FORMATS, ids=lambda path: path.name)
CHECKPOINTS = [path.parent for each in FORMATS for path in sorted(each.glob("*/datastates.manifest"))]
OF_ALL_CHECKPOINTS = pytest.mark.parametrize(
    "directory", CHECKPOINTS, ids=lambda path: f"{path.parent.name}/{path.name}"
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


NEAR = HERE / "near"
NEAR_SHA256 = {
    "datastates.jobs": "2b6610b1e01837faa7fedd9d15b4e2f08c83a1296d1b1d005b57c64615b0f6fe",
    "nodes.json": "bce13b9bec45adad5f041c637cd97bbf1091302302e7fc4598d62bfdc0dc7a48",
}


def opened(directory: Path) -> Checkpoint:
    return Checkpoint.open(directory, made.OPTIONS)


@OF_ALL_FORMATS
def test_the_golden_files_are_as_they_were_made(each):
    digest = hashlib.sha256()
    for path in sorted(path for path in each.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(each)}\n".encode() + path.read_bytes())
    assert digest.hexdigest() == GOLDEN_SHA256[each.name]


# -- reading ----------------------------------------------------------------------------------------------


@OF_ALL_FORMATS
@pytest.mark.parametrize("key", KEYS)
def test_every_tensor_is_read_bit_for_bit(key, each):
    found = opened(each / "one-rank").read_tensor(key)
    assert (found.dtype, tuple(found.shape)) == (made.dtype_of(key), made.SHAPES[key])
    assert bits(found) == made.pattern(key)


@OF_ALL_FORMATS
def test_every_object_is_read(each):
    assert opened(each / "one-rank").read_objects(made.OBJECTS) == made.OBJECTS
    assert opened(each / "two-ranks").read_object("object") == {"rank": 1}


@OF_ALL_FORMATS
def test_golden_checkpoints_have_no_other_contents(each):
    one, two = opened(each / "one-rank").index, opened(each / "two-ranks").index
    assert set(one.tensors) == set(made.SHAPES)
    assert set(one.objects) == set(made.OBJECTS)
    assert set(two.tensors) == {piece.key for _, _, piece in made.PIECES}
    assert set(two.objects) == {"object"}
    assert not one.streams and not two.streams


@OF_ALL_FORMATS
@pytest.mark.parametrize("key", ["cut", "rows", "layers.0.weight"])
def test_a_tensor_in_several_fragments_is_read_whole(key, each):
    found = opened(each / "two-ranks").read_tensor(key)
    assert found.dtype is made.whole(key).dtype
    assert torch.equal(found, made.whole(key))


@OF_ALL_FORMATS
def test_a_slice_over_several_fragments_is_read(each):
    found = opened(each / "two-ranks").read_tensor("cut", [1, 1], [2, 3])
    assert torch.equal(found, made.whole("cut")[1:3, 1:4])


@OF_ALL_CHECKPOINTS
def test_golden_checkpoints_are_whole(directory):
    verdict = verify(directory, options=made.OPTIONS)
    assert verdict.faults == []
    assert verdict.unchecked_files == (directory.name == "two-ranks")


@OF_ALL_FORMATS
def test_manifests_decode_to_the_same_values(each):
    one, two = opened(each / "one-rank").manifest, opened(each / "two-ranks").manifest
    assert one.format_version == two.format_version == int(each.name[-1])
    assert (one.save_id, one.iteration, one.parallel) == (
        SaveId(made.RUN_ID, 1),
        1234,
        {"tensor": 1, "data": 1},
    )
    assert (two.save_id, two.iteration, two.parallel) == (SaveId(2**64 - 1, 7), None, {})
    assert [file.rank for file in two.files] == [0, 1]
    assert (one.compatible, two.compatible) == (1, 1 << 30)


@OF_ALL_FORMATS
def test_flipped_bits_of_golden_data_are_found(tmp_path, each):
    for path in (each / "one-rank").iterdir():
        data = bytearray(path.read_bytes())
        if path.name.startswith("data-"):
            data[5000] ^= 1
        (tmp_path / path.name).write_bytes(data)
    assert not verify(tmp_path, options=made.OPTIONS).good


TAILS = HERE / "format-2" / "tails"


def test_encoded_tensors_are_read_bit_for_bit():
    checkpoint = opened(TAILS)
    assert torch.equal(checkpoint.read_tensor("grid"), made.GRID)
    assert torch.equal(checkpoint.read_tensor("grid", [350, 3], [100, 7]), made.GRID[350:450, 3:10])
    assert torch.equal(checkpoint.read_tensor("small"), made.GRID[:2, :3])
    assert {key: entry.encoded for key, entry in checkpoint.tensors.items()} == {"grid": True, "small": True}


def test_streams_and_encoded_objects_are_read():
    checkpoint = opened(TAILS)
    assert b"".join(map(bytes, checkpoint.open_stream("stream"))) == made.STREAM
    assert b"".join(map(bytes, checkpoint.open_stream("plain"))) == b"plain"
    assert checkpoint.read_object("object") == [7] * 9000
    assert (set(checkpoint.streams), checkpoint.objects) == ({"stream", "plain"}, ["object"])


def test_groups_earlier_saves_and_providers_are_what_the_manifest_says():
    manifest = opened(TAILS).manifest
    assert [(file.rank, file.group, manifest.file_save_id(file)) for file in manifest.files] == [
        (0, 0, SaveId(made.RUN_ID, 2)),
        (0, 12, made.EARLIER),
    ]
    assert manifest.providers == made.PROVIDERS
    assert manifest.provider_of("grid").notes == {"cast_from": "float64"}
    assert manifest.provider_of("small").kind == "MegatronState"


# -- writing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DATA_FILES, ids=lambda path: "/".join(path.parts[-3:]))
def test_headers_and_footers_encode_to_the_same_bytes(path):
    data = path.read_bytes()
    assert Header.decode(data[:HEADER_BYTES], "it").encode() == data[:HEADER_BYTES]
    checkpoint = opened(path.parent)
    (entry,) = [entry for entry in checkpoint.manifest.files if entry.name == path.name]
    footer = Footer.decode(data[entry.footer_offset :], "it")
    assert footer.encode() == data[entry.footer_offset :]
    assert footer.crc == entry.footer_crc


@OF_ALL_CHECKPOINTS
def test_manifests_and_indexes_encode_to_the_same_bytes(directory):
    data = (directory / MANIFEST_NAME).read_bytes()
    manifest = Manifest.decode(data, "it")
    assert manifest.format_version == 1 or manifest.encode() == data
    encoded = (directory / manifest.index.name).read_bytes()
    index, version = Index.decode(encoded, "it", len(manifest.files)), manifest.format_version
    again = Index(dict(index.tensors), index.objects, index.streams)
    assert again.encode(packed=True, version=version) == encoded


@pytest.mark.parametrize("version", [1, 2])
def test_an_index_built_anew_has_the_same_bytes(version):
    (golden,) = (HERE / f"format-{version}" / "two-ranks").glob("index-*")
    index = made.two_ranks_index({"object": 1})
    assert index.encode(packed=True, version=version) == golden.read_bytes()


@pytest.mark.parametrize(
    "directory",
    [*(path for path in CHECKPOINTS if path.name != "two-ranks"), *sorted(HERE.glob("megatron-*"))],
    ids=lambda path: path.name,
)
def test_footers_prove_that_the_index_belongs_to_the_data_files(directory):
    checkpoint = opened(directory)
    for file in range(len(checkpoint.manifest.files)):
        footer = checkpoint.footer(file)
        own = hashlib.sha256(checkpoint.index.own_index(file, footer.format_version)).digest()
        assert footer.layout_digest == own[:16]


@dataclasses.dataclass(frozen=True)
class StoredObject:
    """An object with the golden bytes, since the output of torch.save may change with torch."""

    key: str
    data: bytes
    mutability = Mutability.NEVER
    kind = Kind.OBJECT

    def snapshot(self, budget: CopyBudget) -> StoredObject:
        return self

    def write(self, write: Write) -> None:
        write(self.data)


@pytest.mark.skipif(len(KEYS) < len(made.SHAPES), reason="this torch lacks dtypes of the golden state")
def test_saving_the_same_state_writes_the_same_data_file_and_index(tmp_path):
    golden = LAST / "one-rank"
    (path,) = golden.glob("data-*.bin")
    data, places = path.read_bytes(), opened(golden).footer(0).objects
    stored = [StoredObject(key, data[e.offset : e.offset + e.bytes]) for key, e in places.items()]
    made.save_one_rank(tmp_path / "again", stored)
    assert (tmp_path / "again" / path.name).read_bytes() == data
    (index,) = golden.glob("index-*")
    (again,) = (tmp_path / "again").glob(index.name)
    assert again.read_bytes() == index.read_bytes()


def test_the_same_state_by_hand_has_the_same_bytes(tmp_path):
    two = LAST / "two-ranks"
    with pytest.MonkeyPatch.context() as patch:
        serialized = opened(two).footer(1).objects["object"]
        golden = (two / SaveId(2**64 - 1, 7).data_file_name(1)).read_bytes()
        raw = golden[serialized.offset : serialized.offset + serialized.bytes]
        patch.setattr(made.ObjectSource, "serialize", lambda self: raw)
        made.make_two_ranks(tmp_path / "again")
    for path in two.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


# -- beside checkpoints -----------------------------------------------------------------------------------


def test_files_of_near_tiers_are_read_and_written_as_they_were(tmp_path):
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in NEAR.iterdir()}
    assert digests == NEAR_SHA256
    assert (jobs_in(NEAR), nodes_in(NEAR)) == (made.JOBS, made.NODES)
    made.make_near(tmp_path)
    for name in NEAR_SHA256:
        assert (tmp_path / name).read_bytes() == (NEAR / name).read_bytes()


def test_nodes_of_a_later_release_are_read_without_what_it_has_added(tmp_path):
    later = (NEAR / "nodes.json").read_bytes().replace(b'{"own"', b'{"added":[1],"own"')
    (tmp_path / "nodes.json").write_bytes(later)
    assert nodes_in(tmp_path) == made.NODES


@OF_ALL_FORMATS
def test_a_golden_index_with_a_changed_byte_is_refused(tmp_path, each):
    for path in (each / "two-ranks").iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= path.name.startswith("index-")
        (tmp_path / path.name).write_bytes(data)
    with pytest.raises(FormatError, match="SHA-256"):
        list(opened(tmp_path).index.tensors.values())
