"""No interleaving of the publishing protocol breaks a rule; with a step left out, the search finds one.

What the model covers and what it does not: tests/model/protocol.py. To read how a mutant fails:
`print(search(dataclasses.replace(TWO_RUNS, mutants=frozenset({"no look before the manifest"}))))`.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.model.files import MANIFEST, Files, save_of
from tests.model.search import Found, search
from tests.model.state import Model

ONE_EACH = Model(saves=(("a1",), ("b1",)), faulty=(0,))
TWO_RUNS = Model(saves=(("a1", "a2"), ("b1", "b2")), faulty=(0,))
OVERLAPPING = Model(saves=(("a1",), ("a2",)), same_run=True)
NEW_DIRECTORY = Model(saves=(("a1",), ("b1",)), old=False, faulty=(0,))
ALONE = Model(saves=(("a1", "a2"), ()), faults=2, faulty=(0,))
PRUNED = Model(saves=(("a1", "a2"), ()), prune="checkpoint")
PRUNED_LEFT_OVERS = Model(saves=(("a1",), ("b1",)), prune="left-overs", faulty=(0,))
MODELS = {
    "a new directory": NEW_DIRECTORY,  # two runs, and fast: CI searches this one (--first-case)
    "two runs, each saves again": TWO_RUNS,
    "two saves of one run that overlap": OVERLAPPING,
    "one run with two faults": ALONE,
    "prune removes the checkpoint": PRUNED,
    "prune removes left-overs": PRUNED_LEFT_OVERS,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MODELS)
def test_no_interleaving_publishes_a_damaged_checkpoint(name):
    found = search(MODELS[name])
    assert not found.violation, str(found)
    assert found.states > 500, "too few states: the model has become too small to prove much"
    assert_ends_are_as_the_protocol_says(MODELS[name], found)


def assert_ends_are_as_the_protocol_says(model: Model, found: Found) -> None:
    """Checks that all end, only dead runs leave temporary files, and a run without faults leaves nothing."""
    for state in found.ends:
        assert all(run.at in ("ended", "dead") for run in state.runs), state
        files = Files(state.directory)
        named = save_of(files.get(MANIFEST))
        keep = {MANIFEST, *(model.files(named) if named else ())}
        rest = {name for name in files.listed() if name not in keep}
        if model is ALONE and state.faults_left == 2:
            assert not rest, rest
        if not any(run.at == "dead" for run in state.runs):
            assert not any(name.startswith("temporary") for name in rest), rest


MUTANTS = [
    (ONE_EACH, "data is not synced", "(1)"),
    (ONE_EACH, "manifest is not synced", "(1)"),
    (ONE_EACH, "directory of manifest is not synced", "(1)"),
    (NEW_DIRECTORY, "directory of manifest is not synced", "(2)"),
    (ONE_EACH, "directory of data is not synced + directory of index is not synced", "(1)"),
    (ONE_EACH, "old manifest is read after the rename", "(1)"),
    (ONE_EACH, "agreement is left out", "(1)"),
    (ONE_EACH, "temporary name is shared", "(1)"),
    (TWO_RUNS, "index name is shared", "(1)"),
    (ONE_EACH, "all that the manifest does not name is removed", "(1)"),
    (ONE_EACH, "files of a run that is under way are removed", "(1)"),
    (TWO_RUNS, "what other runs have left goes without a sync", "(1)"),
    (ONE_EACH, "files are removed before the rename", "(1)"),
    (ONE_EACH, "files are removed after records were sent", "(1)"),
    (ONE_EACH, "files are removed even if the manifest was renamed", "(1)"),
    (ONE_EACH, "files are removed if another manifest is in place", "(1)"),
    (ONE_EACH, "a rename that reports an error counts as none", "(1)"),
    (ONE_EACH, "a failed save leaves its index", "(4)"),
    (OVERLAPPING, "saves of a run publish at once", "(1)"),
    (OVERLAPPING, "no look before the manifest", "(1)"),
    (PRUNED, "prune does not read what it renamed", "(3)"),
    (PRUNED, "prune does not sync the rename", "(1)"),
    (PRUNED, "prune removes what it has not listed", "(1)"),
    (PRUNED, "prune has no guard", "(1)"),
    (dataclasses.replace(PRUNED_LEFT_OVERS, saves=(("a1",), ())), "prune has no guard", "(1)"),
    (PRUNED_LEFT_OVERS, "prune does not sync what it has read", "(1)"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "mutant", "expected"), MUTANTS)
def test_search_finds_what_a_mutant_breaks(model, mutant, expected):
    found = search(dataclasses.replace(model, mutants=frozenset(mutant.split(" + "))))
    assert found.violation.startswith(expected), str(found)
    assert found.trace, "a violation needs steps that lead to it"
