"""The publishing protocol as a model small enough to be searched exhaustively.

What is modelled: one directory; two runs of two ranks, each with a save and a re-save (or two saves of one
run that overlap); `datastates prune`, as it removes a checkpoint and as it removes left-overs. Each step is
what the file system does atomically: create, write and sync, rename, sync the directory, list, unlink one
file. Runs and prune take steps in any order.

Faults: a run that dies at any step (a rank that dies is no case of its own: the others wait for it, and rank
0's publishing thread takes some more steps, after which the run is as dead); one step of a run that fails;
and a machine that crashes in any state. A crash is not a step but is looked at in every state: each name that
was changed since the directory's last sync may have any of its values since then, independently of all other
names, and what was not synced is torn. What follows a machine crash is what follows the death of both runs.

How the states are kept few: a behaviour has one fault (a death or a failure), which is the first run's where
both are alike; ranks of a save are alike until they are durable, so rank 1 is never ahead of rank 0; a
removal takes the names in one order; metadata.json, which names no files, is there only as a step that may
fail. Polls are one step that all ranks take, once there is something to agree on: how they come to agree is
the matter of pipeline/agreement.py and of tests/faults.

What the search finds to be redundant: the ranks' syncs of the directory alone (the index's sync repeats
them), and prune's second look at left-overs (with its guard, which it is there to back up).

Not modelled: file systems whose clients do not see each other's names at once (NFS with attribute caches), or
whose rename is not atomic; syncs that lie; clocks (prune takes files for old only if their save is over or
dead, so its guard of an hour is an assumption here); files of others; hostile contents; a third run; removal
of the directory itself; a fault of prune between its rename of a manifest and its look at it.

The names of the steps and rules are those of pipeline/publication.py, engine/atomic_files.py and
pipeline/prune.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

# -- the directory ------------------------------------------------------------------------------------------

Value = str | None  # None: no such file. Data and indexes: EMPTY, WRITTEN or DURABLE. Manifests: save + those
EMPTY, WRITTEN, DURABLE = "empty", "written", "durable"
MANIFEST, REMOVAL = "manifest", "removal"
OLD = "old"  # the save of a run that ended long ago

# name -> its values since the directory was synced last; the last one is what everybody sees
Directory = tuple[tuple[str, tuple[Value, ...]], ...]


class Files:
    """A directory while a step changes it."""

    def __init__(self, directory: Directory) -> None:
        self._names = dict(directory)

    def frozen(self) -> Directory:
        return tuple(sorted((name, values) for name, values in self._names.items() if values != (None,)))

    def values(self, name: str) -> tuple[Value, ...]:
        return self._names.get(name, (None,))

    def get(self, name: str) -> Value:
        return self.values(name)[-1]

    def put(self, name: str, value: Value) -> None:
        """Creates, replaces or unlinks."""
        values = self.values(name)
        if value != values[-1]:
            self._names[name] = (*values, value)

    def write(self, name: str, content: str, *, sync: bool) -> None:
        """Changes an inode, whose name may be durable or not."""
        values = self.values(name)
        if values[-1] is not None:  # else somebody took it away: the bytes go nowhere
            end = DURABLE if sync else WRITTEN
            self._names[name] = (*values[:-1], f"{content}{end}")

    def rename(self, old: str, new: str) -> None:
        value = self.get(old)
        self.put(old, None)
        self.put(new, value)

    def sync(self) -> None:
        self._names = {name: values[-1:] for name, values in self._names.items()}

    def listed(self) -> list[str]:
        return sorted(name for name in self._names if self.get(name) is not None)


def save_of(value: Value) -> str | None:
    """The save whose files a manifest of this content names; None if it cannot be read."""
    save, _, state = (value or "").partition(" ")
    return save if state in (WRITTEN, DURABLE) else None


# -- the protocol and what may be left out of it ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Model:
    """Who takes part, and which steps are left out (`mutants`)."""

    saves: tuple[tuple[str, ...], ...] = (("a1", "a2"), ("b1", "b2"))  # of each run, in turn
    same_run: bool = False  # the saves of both are of one run, the second's are later
    old: bool = True  # the directory has a checkpoint at first
    prune: str = ""  # "", "checkpoint" or "left-overs"
    faults: int = 1  # in one behaviour
    faulty: tuple[int, ...] = (0, 1)  # runs that may have it; where both are alike, one is enough
    mutants: frozenset[str] = frozenset()

    def data(self, save: str) -> tuple[str, ...]:
        return (f"data-0-{save}", f"data-1-{save}")

    def index(self, save: str) -> str:
        if "index name is shared" in self.mutants:
            return "index-1" if save.startswith("a") else "index-2"
        return f"index-{save}"

    def files(self, save: str) -> tuple[str, ...]:
        return (*self.data(save), self.index(save))

    def temporary(self, save: str) -> str:
        return "temporary" if "temporary name is shared" in self.mutants else f"temporary-{save}"

    def owner(self, name: str) -> str:
        """The save that made a file."""
        return name.rpartition("-")[2]

    def earlier(self, save: str) -> tuple[str, ...]:
        """Saves of the same run before this one."""
        mine = self.saves[0] + self.saves[1] if self.same_run else next(s for s in self.saves if save in s)
        return mine[: mine.index(save)]

    def all_saves(self) -> tuple[str, ...]:
        return (OLD, *(save for saves in self.saves for save in saves))

    def start(self) -> State:
        files = Files(())
        if self.old:
            for name in self.files(OLD):
                files.put(name, DURABLE)
            files.put(MANIFEST, f"{OLD} {DURABLE}")
            files.sync()
        runs = tuple(Run() if saves else Run(at="ended") for saves in self.saves)
        prune = Prune("look" if self.prune else "ended")
        return State(files.frozen(), runs, prune, self.faults, OLD if self.old else "")


class Run(NamedTuple):
    """Where a run is. Its save is the nth of Model.saves."""

    nth: int = 0
    at: str = "ranks write"  # or a step of the publishing thread, "give up", "ended", "dead"
    ranks: tuple[str, str] = ("begun", "begun")  # "made", "synced", "durable"; "failed"
    renamed: bool = False  # its manifest
    replaced: str | None = None  # the save that the manifest names that it is about to replace
    todo: tuple[str, ...] = ()
    failed_late: bool = False  # agreed to fail while the publishing thread was at work


class Prune(NamedTuple):
    """Where prune is."""

    at: str = "ended"
    decided: str | None = None  # the save that the manifest named when prune looked
    todo: tuple[str, ...] = ()


class State(NamedTuple):
    """Of all."""

    directory: Directory
    runs: tuple[Run, ...]
    prune: Prune
    faults_left: int
    vouched: str  # the last save that reported success, or the old checkpoint; "" if there is none
    broken: str = ""  # what a step did that it must never do


def steps(model: Model, state: State) -> Iterator[tuple[str, State]]:
    """All that can happen next: what, and the state after it."""
    for number, run in enumerate(state.runs):
        if run.at in ("ended", "dead"):
            continue
        save = model.saves[number][run.nth]
        yield from _run_steps(model, state, number, run, save)
        if _may_fail(model, state, number):
            after = _with_run(state, number, Run(run.nth, "dead"))
            yield f"the run of {save} dies", after._replace(faults_left=state.faults_left - 1)
    if state.prune.at != "ended":
        yield from _prune_steps(model, state)


def _may_fail(model: Model, state: State, number: int) -> bool:
    return state.faults_left > 0 and number in model.faulty


def _with_run(state: State, number: int, run: Run, files: Files | None = None) -> State:
    runs = (*state.runs[:number], run, *state.runs[number + 1 :])
    return state._replace(runs=runs, directory=files.frozen() if files else state.directory)


def _run_steps(model: Model, state: State, number: int, run: Run, save: str) -> Iterator[tuple[str, State]]:
    if run.at == "ranks write":
        yield from _rank_steps(model, state, number, run, save)
    elif run.at == "give up":
        yield _give_up(model, state, number, run, save)
    else:
        yield from _publisher_steps(model, state, number, run, save)


# -- ranks --------------------------------------------------------------------------------------------------


def _rank_steps(model: Model, state: State, number: int, run: Run, save: str) -> Iterator[tuple[str, State]]:
    order = ("begun", "made", "synced", "durable")
    if "failed" in run.ranks:
        after = _with_run(state, number, _giving_up(model, run, save))
        yield f"{save}: all ranks agree that it failed", after
        return
    for rank in (0, 1):
        at = run.ranks[rank]
        if at == "durable" or (rank == 1 and order.index(at) >= order.index(run.ranks[0])):
            continue
        files, name = Files(state.directory), model.data(save)[rank]
        if at == "begun":
            files.put(name, EMPTY)
            does = "creates its file"
        elif at == "made":
            files.write(name, "", sync="data is not synced" not in model.mutants)
            does = "writes and syncs its file"
        else:
            if "directory of data is not synced" not in model.mutants:
                files.sync()
            does = "syncs the directory"
        ranks = _replaced(run.ranks, rank, order[order.index(at) + 1])
        yield f"{save}: rank {rank} {does}", _with_run(state, number, run._replace(ranks=ranks), files)
        if _may_fail(model, state, number):
            failed = _with_run(state, number, run._replace(ranks=_replaced(run.ranks, rank, "failed")))
            yield f"{save}: rank {rank} fails", failed._replace(faults_left=state.faults_left - 1)
    agreed = run.ranks == ("durable", "durable") or (
        "agreement is left out" in model.mutants and run.ranks[0] == "durable"
    )
    if agreed and not _locked(model, state, number):
        after = _with_run(state, number, run._replace(at="write index"))
        yield f"{save}: all ranks agree that it is durable", after


def _replaced(ranks: tuple[str, str], rank: int, at: str) -> tuple[str, str]:
    return (at, ranks[1]) if rank == 0 else (ranks[0], at)


def _locked(model: Model, state: State, number: int) -> bool:
    """Whether another save of the same process is being published."""
    other = state.runs[1 - number].at
    busy = other not in ("ranks write", "give up", "ended", "dead")
    return model.same_run and busy and "saves of a run publish at once" not in model.mutants


def _giving_up(model: Model, run: Run, save: str) -> Run:
    return run._replace(at="give up", todo=model.data(save))


def _give_up(model: Model, state: State, number: int, run: Run, save: str) -> tuple[str, State]:
    files = Files(state.directory)
    if run.todo:
        files.put(run.todo[0], None)
        after = _with_run(state, number, run._replace(todo=run.todo[1:]), files)
        return f"{save}: gives up {run.todo[0]}", after
    left = [name for name in files.listed() if model.owner(name) == save]
    after = _end(model, state, number, run)
    if left:
        after = after._replace(broken=f"(4) the save {save} failed and left {left}")
    return f"{save}: reports that it failed", after


def _end(model: Model, state: State, number: int, run: Run) -> State:
    """The save is over; the next one of the run begins."""
    if run.nth + 1 == len(model.saves[number]):
        return _with_run(state, number, Run(run.nth, "ended"))
    return _with_run(state, number, Run(run.nth + 1))


# -- rank 0's publishing thread -----------------------------------------------------------------------------

_NEXT = {
    "write index": "rename index",
    "rename index": "sync index",
    "sync index": "look",
    "look": "read old manifest",
    "read old manifest": "create temporary",
    "create temporary": "write temporary",
    "write temporary": "rename manifest",
    "rename manifest": "sync manifest",
    "sync manifest": "look again",
    "look again": "write metadata",
    "write metadata": "list",
    "list": "remove",
}
_MAY_FAIL = {
    "write index",
    "sync index",
    "create temporary",
    "rename manifest",
    "sync manifest",
    "write metadata",
}


def _publisher_steps(
    model: Model, state: State, number: int, run: Run, save: str
) -> Iterator[tuple[str, State]]:
    if _may_fail(model, state, number):
        fewer = state._replace(faults_left=state.faults_left - 1)
        if run.at in _MAY_FAIL:
            yield f"{save}: fails to {run.at}", _failed(model, fewer, number, run, save)
        if not run.failed_late:
            # A rank fails after records went out: all report a failure, the publishing thread goes on.
            if "files are given up after records went out" in model.mutants:
                after = run._replace(failed_late=True)
                files = Files(state.directory)
                files.put(model.data(save)[1], None)
                yield f"{save}: rank 1 fails and gives up", _with_run(fewer, number, after, files)
            else:
                after = run._replace(failed_late=True)
                yield f"{save}: rank 1 fails, files are kept", _with_run(fewer, number, after)
    files = Files(state.directory)
    if run.at == "remove":
        yield _remove(model, state, number, run, save)
        return
    label = f"{save}: {run.at}"
    after = run._replace(at=_next(model, run.at))
    temporary = model.temporary(save)
    if run.at == "write index":
        files.put(temporary, EMPTY)
        files.write(temporary, "", sync=True)
    elif run.at == "rename index":
        if files.get(temporary) is None:
            yield f"{label}: its temporary is gone", _failed(model, state, number, run, save)
            return
        files.rename(temporary, model.index(save))
    elif run.at in ("sync index", "sync manifest"):
        files.sync()
    elif run.at == "look":
        if any(files.get(name) is None for name in model.files(save)):  # by size: not whether it is whole
            yield f"{label}: files are missing", _failed(model, state, number, run, save)
            return
    elif run.at == "read old manifest":
        after = after._replace(replaced=save_of(files.get(MANIFEST)))
    elif run.at == "create temporary":
        files.put(temporary, EMPTY)
    elif run.at == "write temporary":
        files.write(temporary, f"{save} ", sync="manifest is not synced" not in model.mutants)
    elif run.at == "rename manifest":
        if files.get(temporary) is None:
            yield f"{label}: its temporary is gone", _failed(model, state, number, run, save)
            return
        files.rename(temporary, MANIFEST)
        after = after._replace(renamed=True)
    elif run.at == "look again":
        found = files.get(MANIFEST)
        missing = any(files.get(name) is None for name in model.files(save))
        if found is None or (missing and save_of(found) == save):
            yield f"{label}: it is gone", _failed(model, state, number, run, save)
            return
    elif run.at == "list":
        after = after._replace(todo=_to_remove(model, files, run, save))
    yield label, _with_run(state, number, after, files)


def _next(model: Model, at: str) -> str:
    """Skips what is left out; moves what comes too early or too late."""
    following = _NEXT[at]
    left_out = {
        "look": "no look before the manifest",
        "look again": "no look after the manifest",
        "sync manifest": "directory of manifest is not synced",
        "sync index": "directory of index is not synced",
    }
    moved = {
        "old manifest is read after the rename": {
            "look": "create temporary",
            "rename manifest": "read old manifest",
            "read old manifest": "sync manifest",
        },
        "files are removed before the rename": {
            "read old manifest": "list",
            "remove": "create temporary",
            "write metadata": "report",
        },
    }
    for mutant, order in moved.items():
        if mutant in model.mutants and at in order:
            following = order[at]
    if left_out.get(following) in model.mutants:
        return _next(model, following)
    return following


def _to_remove(model: Model, files: Files, run: Run, save: str) -> tuple[str, ...]:
    """As engine.atomic_files.remove_replaced."""
    keep = set(model.files(save))
    old = set(model.files(run.replaced)) if run.replaced else set()
    for before in model.earlier(save):
        old |= {*model.files(before), model.temporary(before)}
    if "all that the manifest does not name is removed" in model.mutants:
        old = set(files.listed()) - {MANIFEST, REMOVAL}
    return tuple(name for name in files.listed() if name in old - keep)


def _remove(model: Model, state: State, number: int, run: Run, save: str) -> tuple[str, State]:
    files = Files(state.directory)
    if run.todo:
        files.put(run.todo[0], None)
        after = _with_run(state, number, run._replace(todo=run.todo[1:]), files)
        return f"{save}: removes {run.todo[0]}", after
    if not run.renamed:  # a mutant's order
        return f"{save}: has removed", _with_run(state, number, run._replace(at="create temporary"))
    after = _end(model, state, number, run)
    if run.failed_late:
        return f"{save}: has published after all", after
    values = files.values(MANIFEST)
    mine = [nth for nth, value in enumerate(values) if save_of(value) == save]
    if mine and mine[0] > 0 and not _is_taken(state):
        after = after._replace(broken=f"(2) {save} reports success, and a crash may bring {values[0]} back")
    return f"{save}: reports success", after._replace(vouched=save)


def _failed(model: Model, state: State, number: int, run: Run, save: str) -> State:
    """As the except clause of Publication._publish_alone, and what all ranks then agree on."""
    files = Files(state.directory)
    if run.at in ("rename index", "write temporary", "rename manifest"):
        files.put(model.temporary(save), None)
    in_place = run.renamed
    if "files are given up where another manifest is in place" in model.mutants:
        in_place = save_of(files.get(MANIFEST)) == save
    if "files are given up whatever was renamed" in model.mutants:
        in_place = False
    if in_place or run.failed_late:
        return _end(model, _with_run(state, number, run, files), number, run)
    if "a failed save leaves its index" not in model.mutants:
        files.put(model.index(save), None)
    return _with_run(state, number, _giving_up(model, run, save), files)


# -- prune --------------------------------------------------------------------------------------------------


def _is_old(model: Model, state: State, name: str) -> bool:
    """Prune's guard: no save that may still publish has files that are an hour old."""
    owner = model.owner(name)
    for number, saves in enumerate(model.saves):
        if owner in saves:
            run = state.runs[number]
            over = run.at in ("ended", "dead") or saves.index(owner) < run.nth
            return over or "prune has no guard" in model.mutants
    return True


def _unnamed(model: Model, files: Files) -> list[str]:
    named = save_of(files.get(MANIFEST))
    keep = {MANIFEST, REMOVAL, *(model.files(named) if named else ())}
    return [name for name in files.listed() if name not in keep]


def _prune_steps(model: Model, state: State) -> Iterator[tuple[str, State]]:
    files = Files(state.directory)
    if model.prune == "checkpoint":
        yield from _prune_checkpoint(model, state, files)
    else:
        yield from _prune_left_overs(model, state, files)


def _pruned(state: State, prune: Prune, files: Files) -> State:
    return state._replace(prune=prune, directory=files.frozen())


def _prune_checkpoint(model: Model, state: State, files: Files) -> Iterator[tuple[str, State]]:
    prune = state.prune
    if prune.at == "look":
        if save_of(files.get(MANIFEST)) != OLD:
            return  # what the rules let go is the old one
        if any(not _is_old(model, state, name) for name in _unnamed(model, files)):
            return  # it stays for now
        after = prune._replace(at="rename", decided=OLD, todo=tuple(files.listed()))
        state = state._replace(vouched="" if state.vouched == OLD else state.vouched)
        yield "prune: decides to remove the checkpoint", _pruned(state, after, files)
    elif prune.at == "rename":
        if files.get(MANIFEST) is not None:
            files.rename(MANIFEST, REMOVAL)
        yield "prune: renames the manifest", _pruned(state, prune._replace(at="compare"), files)
    elif prune.at == "compare":
        taken = save_of(files.get(REMOVAL))
        if taken == prune.decided or "prune does not look at what it renamed" in model.mutants:
            yield "prune: it is the one", _pruned(state, prune._replace(at="sync"), files)
        else:
            yield "prune: it is another", _pruned(state, prune._replace(at="put back"), files)
    elif prune.at == "put back":
        if files.get(MANIFEST) is None:
            files.put(MANIFEST, files.get(REMOVAL))
        files.put(REMOVAL, None)
        yield "prune: puts the manifest back", _pruned(state, prune._replace(at="sync back"), files)
    elif prune.at == "sync back":
        files.sync()
        yield "prune: syncs the directory", _pruned(state, Prune("ended"), files)
    elif prune.at == "sync":
        if "prune does not sync the rename" not in model.mutants:
            files.sync()
        todo = prune.todo
        if "prune removes what it has not seen" in model.mutants:
            todo = tuple(files.listed())
        todo = tuple(name for name in todo if name not in (MANIFEST, REMOVAL))
        yield "prune: syncs the directory", _pruned(state, prune._replace(at="remove", todo=todo), files)
    elif prune.todo:
        files.put(prune.todo[0], None)
        yield f"prune: removes {prune.todo[0]}", _pruned(state, prune._replace(todo=prune.todo[1:]), files)
    else:
        files.put(REMOVAL, None)
        yield "prune: ends", _pruned(state, Prune("ended"), files)


def _prune_left_overs(model: Model, state: State, files: Files) -> Iterator[tuple[str, State]]:
    prune = state.prune
    if prune.at == "look":
        todo = tuple(name for name in _unnamed(model, files) if _is_old(model, state, name))
        if todo:
            named = save_of(files.get(MANIFEST))
            yield "prune: lists left-overs", _pruned(state, Prune("sync", named, todo), files)
    elif prune.at == "sync":
        if "prune does not sync what it has read" not in model.mutants:
            files.sync()
        yield "prune: syncs the directory", _pruned(state, prune._replace(at="check"), files)
    elif not prune.todo:
        yield "prune: ends", _pruned(state, Prune("ended"), files)
    elif prune.at == "check":
        name = prune.todo[0]
        goes = save_of(files.get(MANIFEST)) == prune.decided and _is_old(model, state, name)
        if goes or "prune does not look again" in model.mutants:
            yield f"prune: looks at {name} again", _pruned(state, prune._replace(at="unlink"), files)
        else:
            yield f"prune: keeps {name}", _pruned(state, prune._replace(todo=prune.todo[1:]), files)
    else:
        name = prune.todo[0]
        files.put(name, None)
        yield f"prune: removes {name}", _pruned(state, prune._replace(at="check", todo=prune.todo[1:]), files)


def _is_taken(state: State) -> bool:
    """Whether prune has renamed a manifest and not yet looked at it, or not yet put it back for good."""
    return state.prune.at in ("compare", "put back", "sync back")


# -- what must always hold ----------------------------------------------------------------------------------


def violation(model: Model, state: State) -> str:
    """What is wrong in this state, were the machine to crash now or not; empty if nothing is."""
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
    if state.vouched and not _is_taken(state) and None in files.values(MANIFEST):
        return f"(3) {state.vouched} was a checkpoint, and there may be none now"
    return ""
