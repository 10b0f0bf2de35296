"""Checkpoints of buckets as they are converted to optimizer state by parameter, and foreign classes."""

from __future__ import annotations

import argparse
import enum
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_datastates.config import MIB
from megatron_datastates.convert.contents import contents
from megatron_datastates.convert.foreign_classes import changed_object
from megatron_datastates.convert.job import convert
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.planning import plan_conversion
from megatron_datastates.convert.sources.by_parameter import ByParameterSource
from megatron_datastates.convert.sources.source import FragmentRange
from megatron_datastates.errors import OptionError
from megatron_datastates.format.directory import COMMON_FILE, COMMON_STATE_KEY
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.providers.base import Entry, Mutability, Place, StateReader, TensorSource
from megatron_datastates.providers.objects import ObjectSource, deserialize
from megatron_datastates.providers.streams import StreamSource
from tests.unit.command import run
from tests.unit.converting import LEAST, convert_to
from tests.unit.ranks_in_turn import RanksInTurn
from tests.unit.states import Chained, State, Yields, new_saver, save
from tests.unit.test_optimizer_state import BUCKET, bucket, map_of, parameter, shard

PREFIX = "optimizer.distributed.dp_group_idx_"
WHOLE = torch.arange(24.0).reshape(4, 6)
KEY = "optimizer.state.exp_avg.w"
COMMON = {
    "optimizer": {"param_state_sharding_type": "dp_reshardable"},
    "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"},
}


def columns(
    directory: Path,
    common: Any = COMMON,
    *,
    halves: Sequence[int] = (0, 1),
    as_file: bool = False,
    entries: Sequence[Entry] = (),
    iteration: int | None = None,
) -> Path:
    """Saves two halves of a matrix, cut by columns, each with something before it.

    The common state is an object, or a file as before Megatron 0.19.
    """
    tensors: dict[str, torch.Tensor] = {"w": WHOLE.bfloat16()}
    objects: dict[str, Any] = {"rng/shard_0_1": [1]}
    if as_file:
        directory.mkdir()
        torch.save(common, directory / COMMON_FILE)
    elif common is not None:
        objects[COMMON_STATE_KEY] = [common]
    for rank in halves:
        half = WHOLE[:, 3 * rank : 3 * rank + 3]
        tensors[f"{PREFIX}{rank}.{BUCKET}.exp_avg"] = torch.cat([torch.full((5,), -1.0), half.reshape(-1)])
        described = parameter("w", 5, 17, shard("w", (4, 6), (0, 3 * rank), (4, 3), 0, (3, 1)))
        values = {
            "datastates_map": map_of(bucket(17, described)),
            "optimizer": {"param_groups": [{"lr": 1.0}]},
        }
        objects |= {f"{PREFIX}{rank}.{name}/shard_0_1": [value] for name, value in values.items()}
    saver = new_saver()
    extras = PublicationExtras(other_files=[COMMON_FILE] if as_file else [])
    state = Chained(State(tensors, objects), Yields(*entries))
    publication = saver.start(directory, state, extras=extras, iteration=iteration)
    assert publication.wait() is Outcome.PUBLISHED
    saver.close()
    return directory


def test_states_take_the_place_of_buckets_and_of_what_is_beside_them(tmp_path: Path) -> None:
    source = ByParameterSource(open_source(columns(tmp_path / "c")))
    assert source.tensors.keys() == {"w", KEY}
    assert sorted(source.objects) == sorted([COMMON_STATE_KEY, "rng/shard_0_1"])
    assert torch.equal(source.read_tensor(KEY), WHOLE)
    assert torch.equal(source.read_tensor(KEY, (1, 2), (2, 3)), WHOLE[1:3, 2:5])
    held = [one for file in source.stored_by_rank() for one in file.fragments]
    assert sorted(held) == [("w", 0), (KEY, 0), (KEY, 1)] or sorted(held) == [(KEY, 0), (KEY, 1), ("w", 0)]


@pytest.mark.parametrize("as_file", [False, True], ids=["object", "file"])
def test_the_common_state_says_that_state_is_by_parameter(tmp_path: Path, as_file: bool) -> None:
    directory = columns(tmp_path / "c", COMMON | {"args": argparse.Namespace(seed=3)}, as_file=as_file)
    before = sorted(path.read_bytes() for path in directory.iterdir())
    source = ByParameterSource(open_source(directory))
    if as_file:
        assert (list(source.other_files), COMMON_STATE_KEY in source.objects) == ([COMMON_FILE], False)
        common = deserialize(source.other_path(COMMON_FILE).read_bytes(), COMMON_FILE)
    else:
        assert list(source.other_files) == []
        (common,) = deserialize(source.read_object(COMMON_STATE_KEY), COMMON_STATE_KEY)
    kind = "fully_reshardable"
    assert common["content_metadata"] == {
        "distrib_optim_sharding_type": kind,
        "chained_optim_avoid_prefix": True,
    }
    groups = {"param_groups": [{"lr": 1.0}]}
    assert common["optimizer"] == {"optimizer": groups, "param_state_sharding_type": kind}
    assert common["args"] == argparse.Namespace(seed=3)
    assert sorted(path.read_bytes() for path in directory.iterdir()) == before


def test_streams_iteration_and_files_of_others_are_those_of_the_stored_checkpoint(tmp_path: Path) -> None:
    log = StreamSource.from_buffers("log", [b"abc" * 1000])
    directory = columns(tmp_path / "c", entries=[log], iteration=7)
    (directory / "run_config.yaml").write_text("model: gpt")
    source = ByParameterSource(open_source(directory))
    assert sorted(key for file in source.stored_by_rank() for key in file.streams) == ["log"]
    with pytest.raises(OptionError, match="streams, such as 'log', and torch_dist holds none"):
        plan_conversion(source, tmp_path / "theirs", format="torch_dist")
    convert(plan_conversion(source, tmp_path / "ours", format="datastates"), LEAST, verify=True)
    made = open_source(tmp_path / "ours")
    assert b"".join(made.open_stream("log")) == b"abc" * 1000
    assert made.manifest is not None and made.manifest.iteration == 7
    assert (tmp_path / "ours" / "run_config.yaml").read_text() == "model: gpt"
    assert torch.equal(made.read_tensor(KEY), WHOLE)


class _Rank:
    """A tensor that does not change, which gets a file of its own, and half of the matrix of `columns`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def entries(self) -> Iterator[Entry]:
        rank, base = self._rank, torch.ones(2, MIB)
        place = Place((4, MIB), (2 * rank, 0), (2, MIB))
        yield TensorSource("base", base, Mutability.NOW, place, True)
        bucket_of = torch.cat([torch.full((5,), -1.0), WHOLE[:, 3 * rank : 3 * rank + 3].reshape(-1)])
        key, place = f"{PREFIX}{rank}.{BUCKET}.exp_avg", Place((17,), (0,), (17,))
        yield TensorSource(key, bucket_of, Mutability.NOW, place)
        described = parameter("w", 5, 17, shard("w", (4, 6), (0, 3 * rank), (4, 3), 0, (3, 1)))
        yield ObjectSource(f"{PREFIX}{rank}.datastates_map/shard_0_1", [map_of(bucket(17, described))])
        if rank == 0:
            yield ObjectSource(COMMON_STATE_KEY, [COMMON])

    def restore(self, reader: StateReader) -> None:
        raise NotImplementedError


def test_ranks_may_have_several_files(tmp_path: Path) -> None:
    ranks = RanksInTurn(2, link_from=MIB)
    for number in range(2):
        publication = ranks.save(tmp_path / str(number), [_Rank(0), _Rank(1)])
        assert publication.outcome is Outcome.PUBLISHED, publication.error
    ranks.close()
    source = ByParameterSource(open_source(tmp_path / "1"))
    assert source.manifest is not None and [file.rank for file in source.manifest.files] == [0, 0, 1, 1]
    held = [{key for key, _ in file.fragments} for file in source.stored_by_rank()]
    assert held == [{"base", KEY}, {"base", KEY}]


def test_show_lists_states_in_buckets_and_those_that_are_stored_by_parameter(tmp_path: Path) -> None:
    key = "chained_1.optimizer.state.momentum_buffer.v"
    other = TensorSource(key, torch.ones(3), Mutability.NOW)
    source = open_source(columns(tmp_path / "c", entries=[other]))
    assert [(one.key, one.global_shape) for one in contents(source, optimizer=True)] == [
        (key, (3,)),
        (KEY, (4, 6)),
    ]


@pytest.mark.parametrize("begin", [0, 4, 12, 16, 44])
@pytest.mark.parametrize("size", [0, 4, 8, 20, 48])
def test_ranges_may_begin_and_end_within_a_row(begin: int, size: int, tmp_path: Path) -> None:
    source = ByParameterSource(open_source(columns(tmp_path / "c")))
    size = min(size, 48 - begin)
    window = np.full(64, 0xEE, np.uint8)
    number = int(np.flatnonzero(source.tensors[KEY].offsets[:, 1] == 3)[0])
    source.read_ranges([FragmentRange(KEY, number, begin, size, 7)], window)
    expected = WHOLE[:, 3:].contiguous().view(torch.uint8).numpy().reshape(-1)[begin : begin + size]
    assert np.array_equal(window[7 : 7 + size], expected)
    assert (window[:7] == 0xEE).all() and (window[7 + size :] == 0xEE).all()


def test_without_a_map_or_a_common_state_it_is_refused(tmp_path: Path) -> None:
    saver = new_saver()
    save(saver, tmp_path / "plain", {"w": WHOLE}, {COMMON_STATE_KEY: [COMMON]})
    saver.close()
    with pytest.raises(OptionError, match="has no common state, which --optimizer fully-reshardable needs"):
        ByParameterSource(open_source(columns(tmp_path / "no common", None)))
    with pytest.raises(OptionError, match="has no optimizer map, which --optimizer fully-reshardable needs"):
        ByParameterSource(open_source(tmp_path / "plain"))


def test_state_that_a_frozen_part_of_a_parameter_lacks_is_no_damage(tmp_path: Path) -> None:
    columns(tmp_path / "c", halves=[0])
    code, _, error = run("convert", tmp_path / "c", tmp_path / "new", "--optimizer", "fully-reshardable")
    assert code == 2 and f"12 of the 24 elements of '{KEY}'" in error and "damaged" not in error
    assert not (tmp_path / "new").exists()


def test_remainders_of_main_parameters_do_not_become_main_parameters(tmp_path: Path) -> None:
    """A precision-aware optimizer stores, as int16, only the bits that bfloat16 weights lack."""
    described = bucket(12, parameter("w", 0, 12, shard("w", (12,), (0,), (12,), 0, (1,))), states=["param"])
    saver = new_saver()
    tensors = {f"{PREFIX}0.{BUCKET}.param": torch.arange(12, dtype=torch.int16)}
    save(
        saver,
        tmp_path / "c",
        tensors,
        {f"{PREFIX}0.datastates_map/shard_0_1": [map_of(described)], COMMON_STATE_KEY: [COMMON]},
    )
    saver.close()
    code, _, error = run("convert", tmp_path / "c", tmp_path / "new", "--optimizer", "fully-reshardable")
    assert code == 2 and "only the remainders of main parameters in 'optimizer.state.param.w'" in error
    assert not (tmp_path / "new").exists()


def test_an_optimizer_beside_buckets_does_not_lose_its_groups(tmp_path: Path) -> None:
    """As Muon, whose groups are in the common state; what is stored in buckets has them beside its map."""
    described = bucket(12, parameter("w", 0, 12, shard("w", (12,), (0,), (12,), 0, (1,))))
    muon = {"optimizer": {"param_groups": [{"lr": 1.0}]}}
    common = COMMON | {"optimizer": {0: muon, 1: COMMON["optimizer"]}}
    saver = new_saver()
    save(
        saver,
        tmp_path / "c",
        {
            f"chained_1.{PREFIX}0.{BUCKET}.exp_avg": torch.zeros(12),
            "chained_0.optimizer.state.momentum_buffer.v": torch.zeros(3),
        },
        {
            f"chained_1.{PREFIX}0.datastates_map/shard_0_1": [map_of(described)],
            COMMON_STATE_KEY: [common],
        },
    )
    saver.close()
    code, _, error = run("convert", tmp_path / "c", tmp_path / "new", "--optimizer", "fully-reshardable")
    assert code == 2 and "stores 'chained_0.optimizer.state.momentum_buffer.v' by parameter" in error
    assert not (tmp_path / "new").exists()


def test_a_map_beside_a_checkpoint_of_torch_dist_is_not_denied_and_the_way_back_is_named(
    tmp_path: Path,
) -> None:
    theirs = convert_to(columns(tmp_path / "iter_0000001"), tmp_path / "theirs", format="torch_dist")
    with pytest.raises(
        OptionError, match="convert it to datastates, which keeps its optimizer map, and then"
    ):
        ByParameterSource(theirs)
    code, _, error = run("show", tmp_path / "theirs", "--optimizer")
    assert code == 2 and "convert it to datastates, which keeps its map" in error
    back = convert_to(tmp_path / "theirs", tmp_path / "back", format="datastates")
    assert torch.equal(ByParameterSource(back).read_tensor(KEY), WHOLE), "as the message says"


# -- classes that are not installed -------------------------------------------------------------------------


class Backend(enum.Enum):
    FLASH = 5


class Options:
    def __init__(self, needed: int) -> None:
        self.needed = needed


def test_instances_of_classes_stay_what_they_are_without_being_imported(monkeypatch: Any) -> None:
    value = [{"backend": Backend.FLASH, "options": Options(3), "kind": Options, "plain": 1}]
    value.append(argparse.Namespace(backend=Backend.FLASH, size=torch.ones(2)))
    buffer = io.BytesIO()
    torch.save(value, buffer)
    module = sys.modules[__name__]
    monkeypatch.delitem(sys.modules, __name__)
    monkeypatch.setattr(Options, "__init__", None)

    def change(found: Any) -> Any:
        assert type(found[0]["backend"]) is not Backend
        return [{**found[0], "plain": 2}, found[1]]

    changed = changed_object(buffer.getvalue(), "key", change)
    monkeypatch.undo()
    sys.modules[__name__] = module
    found = torch.load(io.BytesIO(changed), weights_only=False)
    assert found[0]["backend"] is Backend.FLASH and found[0]["kind"] is Options
    assert (found[0]["options"].needed, found[0]["plain"]) == (3, 2)
    assert found[1].backend is Backend.FLASH and torch.equal(found[1].size, torch.ones(2))
