"""What all ranks must have alike: which options, and how a difference is said."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_datastates import __version__
from megatron_datastates.config import Options
from megatron_datastates.pipeline.publishing.collectives import are_equal, terms_of
from megatron_datastates.pipeline.publishing.rank_consistency import difference, digest_of, facts_of
from megatron_datastates.pipeline.saving.records import RankRecord
from tests.unit.test_config import SETTINGS

# An option is compared if ranks with other values would make other collective calls, or together would not
# publish what each of them alone would.
COMPARED = {"on_failure", "while_saving", "providers", "near", "near_replicas", "drain_every"}
# A rank's own: the others see what it has decided in its records and its flags, rank 0 decides alone, or it
# acts on memory, threads and files of its own.
OWN = {
    *("staging_memory", "slot_size", "direct_io", "copy_threads", "write_threads", "read_threads"),
    *("copy_limit", "write_limit", "drain_limit", "lazy", "paranoid", "fence_deadline"),
    *("checksums", "compress", "link"),  # in its footers and index, and in its records
    "prepared",  # ranks sum whether all are, where that decides a collective call (preparing.py)
    "trust_objects",  # a rank that refuses an object fails the save, or the load, on all
    *("fallback", "on_damage", "report_file"),  # rank 0 decides (damaged.py, report.py)
    "near_keep",  # a node removes its own files
}
OF_TESTS = {
    *("faults", "driver", "sysfs", "discard", "tripwire", "most_in_flight", "sample_seed", "link_from"),
    "lazy_delay",
}


def test_each_option_is_of_one_kind() -> None:
    """If this fails for a new option: read how it is used, and put it where it belongs."""
    assert {field.name for field in dataclasses.fields(Options)} == COMPARED | OWN | OF_TESTS
    assert len(COMPARED | OWN | OF_TESTS) == len(COMPARED) + len(OWN) + len(OF_TESTS)
    assert set(Options().of_all_ranks()) == COMPARED


@pytest.mark.parametrize("name", SETTINGS)
def test_facts_change_with_options_that_are_compared_only(name: str) -> None:
    text, _ = SETTINGS[name]
    other = facts_of(Options.from_environment({name: text}))
    assert (other != facts_of(Options())) is (name in COMPARED)
    assert (digest_of(other) != digest_of(facts_of(Options()))) is (name in COMPARED)


def test_near_tiers_of_nodes_may_be_different_directories() -> None:
    one, other = (facts_of(Options(near=place)) for place in ("/local/a", "/local/b"))
    assert one == other


def test_the_release_and_the_size_of_records_are_facts() -> None:
    record = RankRecord(0, False, 0, 0, 0, bytes(16), 0, *[0.0] * 7)
    release = facts_of(Options())["megatron_datastates"]
    assert release.startswith(f"{__version__} (records of {len(record.encode())} bytes, ")


@pytest.mark.parametrize("ranks", [2, 3, 1000])
def test_one_rank_that_differs_shows_in_the_maxima(ranks: int) -> None:
    same, other = (terms_of(digest_of(facts_of(Options(on_failure=how)))) for how in ("raise", "warn"))
    for last, is_equal in ((same, True), (other, False)):
        assert are_equal(*map(max, *[same] * (ranks - 1), last)) is is_equal


def test_a_difference_names_one_rank_its_node_and_both_values() -> None:
    first, other = facts_of(Options()), facts_of(Options(on_failure="warn", drain_every=3))
    text = difference([("a", first), ("a", first), ("b", other), ("b", other)])
    assert text.startswith(
        "ranks differ: on rank 2 (node b), --datastates-on-failure is 'warn', not 'raise'; "
        "--datastates-drain-every is '3', not '1' as on rank 0 (node a); 2 of 4 ranks are not as rank 0. "
    )


def test_what_only_one_release_compares_is_a_difference() -> None:
    first = facts_of(Options())
    text = difference([("a", first), ("b", {**first, "--datastates-new": "on"})])
    assert "--datastates-new is 'on', not None as on rank 0 (node a)" in text
