"""The publishing protocol as a model small enough to be searched exhaustively: its steps and its rules.

What is modelled: one directory; two runs of two ranks, each with a save and a re-save (or two overlapping
saves of one run); `datastates prune`, removing a checkpoint or removing left-overs. Each step is what the
file system does atomically: create, write and sync, rename, sync the directory, list, unlink one file. Runs
and prune take steps in any order.

Faults: a run that dies at any step (the death of one rank is not a separate case: the others wait for it,
rank 0's publishing thread takes some more steps, and then the run is as dead); one step of a run that
fails (a rename may report an error and be made all the same); and a machine that crashes in any state. A
crash is not a step but is examined in every state: each name changed since the directory's last sync may have
any of its values since then, independently of all other names, and what was not synced is torn. What follows
a machine crash is what follows the death of both runs.

How the number of states is kept small: a behaviour has one fault (a death or a failure), which is the first
run's if both do the same; the ranks of a save do the same until they are durable, so rank 1 is never ahead
of rank 0; a removal takes the names in one order; metadata.json, which names no files, is only a step that
may fail. Polls are one step that all ranks take once there is something to agree on: how they agree is
tested with pipeline/publishing/collectives.py and in tests/faults.

What the search shows to be redundant: the ranks' own syncs of the directory (the sync after the index
repeats them), and prune's second look at left-overs (its guard suffices; the look backs it up).

Not modelled: file systems whose clients do not see each other's names at once (NFS with attribute caches),
or whose rename is not atomic; syncs that lie; clocks (prune, and saves of other runs, take files for old
only if their save is over or dead, so their guards of an hour and of ten minutes are assumptions here);
foreign files; hostile contents; a third run; removal of the directory itself; a fault of prune between
renaming a manifest and reading it.

The values are in files.py and state.py, the steps in publishing.py and pruning.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.files import DURABLE, MANIFEST, Files
from tests.model.pruning import prune_steps
from tests.model.publishing import run_steps
from tests.model.state import Model, Run, State, is_taken, may_fail, with_run


def steps(model: Model, state: State) -> Iterator[tuple[str, State]]:
    """Yields everything that can happen next: a label, and the state after it."""
    for number, run in enumerate(state.runs):
        if run.at in ("ended", "dead"):
            continue
        save = model.saves[number][run.nth]
        yield from run_steps(model, state, number, run, save)
        if may_fail(model, state, number):
            after = with_run(state, number, Run(run.nth, "dead"))
            yield f"the run of {save} dies", after._replace(faults_left=state.faults_left - 1)
    if state.prune.at != "ended":
        yield from prune_steps(model, state)


def violation(model: Model, state: State) -> str:
    """Returns the rule that this state breaks, or a crash in it would break; empty if none."""
    if state.broken:
        return state.broken
    files = Files(state.directory)
    for value in files.values(MANIFEST):
        if value is None:
            continue
        save, _, end = value.partition(" ")
        if end != DURABLE:
            return f"(1) a manifest may be in place that is not whole: {value!r}"
        for name in model.files(save):
            if any(each != DURABLE for each in files.values(name)):
                return f"(1) the manifest of {save} may be in place, and {name} is not: {files.values(name)}"
    if state.vouched and not is_taken(state) and None in files.values(MANIFEST):
        return f"(3) {state.vouched} was a checkpoint, and there may be none now"
    return ""
