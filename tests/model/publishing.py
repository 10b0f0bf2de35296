"""The steps of a save in the model: its ranks, which write, and rank 0's publishing thread.

What belongs here: each step's effect on the directory, and what a mutant changes in it. The names of the
steps are those of pipeline/publication.py and engine/atomic_files.py; test_order.py compares their order with
that of a real save.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.files import EMPTY, MANIFEST, REMOVAL, Files, save_of
from tests.model.state import Model, Run, State, is_taken, may_fail, with_run

_ORDER = ("begun", "made", "synced", "durable")  # of a rank's steps
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


_LEFT_OUT = {
    "look": "no look before the manifest",
    "look again": "no look after the manifest",
    "sync manifest": "directory of manifest is not synced",
    "sync index": "directory of index is not synced",
}
_MOVED = {
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


def run_steps(model: Model, state: State, number: int, run: Run, save: str) -> Iterator[tuple[str, State]]:
    if run.at == "ranks write":
        yield from _rank_steps(model, state, number, run, save)
    elif run.at == "abandon":
        yield _give_up(model, state, number, run, save)
    else:
        yield from _publisher_steps(model, state, number, run, save)


def _rank_steps(model: Model, state: State, number: int, run: Run, save: str) -> Iterator[tuple[str, State]]:
    if "failed" in run.ranks:
        after = with_run(state, number, _giving_up(model, run, save))
        yield f"{save}: all ranks agree that it failed", after
        return
    for rank in (0, 1):
        at = run.ranks[rank]
        if at == "durable" or (rank == 1 and _ORDER.index(at) >= _ORDER.index(run.ranks[0])):
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
        ranks = _replaced(run.ranks, rank, _ORDER[_ORDER.index(at) + 1])
        yield f"{save}: rank {rank} {does}", with_run(state, number, run._replace(ranks=ranks), files)
        if may_fail(model, state, number):
            failed = with_run(state, number, run._replace(ranks=_replaced(run.ranks, rank, "failed")))
            yield f"{save}: rank {rank} fails", failed._replace(faults_left=state.faults_left - 1)
    agreed = run.ranks == ("durable", "durable") or (
        "agreement is left out" in model.mutants and run.ranks[0] == "durable"
    )
    if agreed and not _locked(model, state, number):
        after = with_run(state, number, run._replace(at="write index"))
        yield f"{save}: all ranks agree that it is durable", after


def _replaced(ranks: tuple[str, str], rank: int, at: str) -> tuple[str, str]:
    return (at, ranks[1]) if rank == 0 else (ranks[0], at)


def _locked(model: Model, state: State, number: int) -> bool:
    """Returns whether another save of the same process is being published."""
    other = state.runs[1 - number].at
    busy = other not in ("ranks write", "abandon", "ended", "dead")
    return model.same_run and busy and "saves of a run publish at once" not in model.mutants


def _giving_up(model: Model, run: Run, save: str) -> Run:
    return run._replace(at="abandon", todo=model.data(save))


def _give_up(model: Model, state: State, number: int, run: Run, save: str) -> tuple[str, State]:
    files = Files(state.directory)
    if run.todo:
        files.put(run.todo[0], None)
        after = with_run(state, number, run._replace(todo=run.todo[1:]), files)
        return f"{save}: removes its {run.todo[0]}", after
    left = [name for name in files.listed() if model.owner(name) == save]
    after = _end(model, state, number, run)
    if left:
        after = after._replace(broken=f"(4) the save {save} failed and left {left}")
    return f"{save}: reports that it failed", after


def _end(model: Model, state: State, number: int, run: Run) -> State:
    """Ends the save; the next one of the run begins."""
    if run.nth + 1 == len(model.saves[number]):
        return with_run(state, number, Run(run.nth, "ended"))
    return with_run(state, number, Run(run.nth + 1))


def _publisher_steps(
    model: Model, state: State, number: int, run: Run, save: str
) -> Iterator[tuple[str, State]]:
    if may_fail(model, state, number):
        yield from _publisher_faults(model, state, number, run, save)
    if run.at == "remove":
        yield _remove(model, state, number, run, save)
    else:
        yield _publisher_step(model, state, number, run, save)


def _publisher_faults(
    model: Model, state: State, number: int, run: Run, save: str
) -> Iterator[tuple[str, State]]:
    fewer = state._replace(faults_left=state.faults_left - 1)
    if run.at in _MAY_FAIL:
        yield f"{save}: fails to {run.at}", _failed(model, fewer, number, run, save)
    if run.at == "rename manifest":  # as where a server's answer is lost, and it does not answer again
        files = Files(state.directory)
        files.rename(model.temporary(save), MANIFEST)
        renamed = run._replace(renamed="a rename that reports an error counts as none" not in model.mutants)
        after = _failed(model, with_run(fewer, number, renamed, files), number, renamed, save)
        yield f"{save}: renames its manifest, and learns of an error", after
    if run.failed_late:
        return
    # A rank fails after sending its record: all ranks report a failure, the publishing thread continues.
    after = run._replace(failed_late=True)
    if "files are removed after records were sent" in model.mutants:
        files = Files(state.directory)
        files.put(model.data(save)[1], None)
        yield f"{save}: rank 1 fails and removes its file", with_run(fewer, number, after, files)
    else:
        yield f"{save}: rank 1 fails, files are kept", with_run(fewer, number, after)


def _publisher_step(model: Model, state: State, number: int, run: Run, save: str) -> tuple[str, State]:
    files, temporary = Files(state.directory), model.temporary(save)
    if why := _refusal(model, files, run, save):
        return f"{save}: {run.at}: {why}", _failed(model, state, number, run, save)
    after = run._replace(at=_next(model, run.at))
    if run.at == "write index":
        files.put(temporary, EMPTY)
        files.write(temporary, "", sync=True)
    elif run.at == "rename index":
        files.rename(temporary, model.index(save))
    elif run.at in ("sync index", "sync manifest"):
        files.sync()
    elif run.at == "read old manifest":
        after = after._replace(replaced=save_of(files.get(MANIFEST)))
    elif run.at == "create temporary":
        files.put(temporary, EMPTY)
    elif run.at == "write temporary":
        files.write(temporary, f"{save} ", sync="manifest is not synced" not in model.mutants)
    elif run.at == "rename manifest":
        files.rename(temporary, MANIFEST)
        after = after._replace(renamed=True)
    elif run.at == "list":
        after = after._replace(todo=_to_remove(model, state, number, files, run, save))
        is_left = any(model.owner(name) in model.saves[1 - number] for name in after.todo)
        if is_left and "what other runs have left goes without a sync" not in model.mutants:
            files.sync()
    return f"{save}: {run.at}", with_run(state, number, after, files)


def _refusal(model: Model, files: Files, run: Run, save: str) -> str:
    """Returns why the publishing thread abandons the save at this step; empty if it does not."""
    is_missing = any(files.get(name) is None for name in model.files(save))  # checks sizes, not contents
    if run.at in ("rename index", "rename manifest") and files.get(model.temporary(save)) is None:
        return "its temporary file is gone"
    if run.at == "look" and is_missing:
        return "files are missing"
    if run.at == "look again":
        found = files.get(MANIFEST)
        if found is None or (is_missing and save_of(found) == save):
            return "the manifest or a file of it is gone"
    return ""


def _next(model: Model, at: str) -> str:
    """Returns the step after this one, in the order that the mutants make of the protocol's."""
    following = _NEXT[at]
    for mutant, order in _MOVED.items():
        if mutant in model.mutants:
            following = order.get(at, following)
    if _LEFT_OUT.get(following) in model.mutants:
        return _next(model, following)
    return following


def _to_remove(model: Model, state: State, number: int, files: Files, run: Run, save: str) -> tuple[str, ...]:
    """Lists what engine.atomic_files.remove_replaced would remove."""
    keep, named = set(model.files(save)), save_of(files.get(MANIFEST))
    old = set(model.files(run.replaced)) if run.replaced else set()
    for before in model.earlier(save):
        old |= {*model.files(before), model.temporary(before)}
    other = state.runs[1 - number]
    if other.at in ("ended", "dead") or "files of a run that is under way are removed" in model.mutants:
        for left in () if model.same_run else model.saves[1 - number]:
            if left != named:
                old |= {*model.files(left), model.temporary(left)}
    if "all that the manifest does not name is removed" in model.mutants:
        old = set(files.listed()) - {MANIFEST, REMOVAL}
    return tuple(name for name in files.listed() if name in old - keep)


def _remove(model: Model, state: State, number: int, run: Run, save: str) -> tuple[str, State]:
    files = Files(state.directory)
    if run.todo:
        files.put(run.todo[0], None)
        after = with_run(state, number, run._replace(todo=run.todo[1:]), files)
        return f"{save}: removes {run.todo[0]}", after
    if not run.renamed:  # only in a mutant
        return f"{save}: has removed", with_run(state, number, run._replace(at="create temporary"))
    after = _end(model, state, number, run)
    if run.failed_late:
        return f"{save}: has published after all", after
    values = files.values(MANIFEST)
    mine = [nth for nth, value in enumerate(values) if save_of(value) == save]
    if mine and mine[0] > 0 and not is_taken(state):
        after = after._replace(broken=f"(2) {save} reports success, and a crash may bring {values[0]} back")
    return f"{save}: reports success", after._replace(vouched=save)


def _failed(model: Model, state: State, number: int, run: Run, save: str) -> State:
    """Does what a DirectoryPublisher does on an error, and what all ranks then agree on."""
    files = Files(state.directory)
    if run.at in ("rename index", "write temporary", "rename manifest"):
        files.put(model.temporary(save), None)
    in_place = run.renamed
    if "files are removed if another manifest is in place" in model.mutants:
        in_place = save_of(files.get(MANIFEST)) == save
    if "files are removed even if the manifest was renamed" in model.mutants:
        in_place = False
    if in_place or run.failed_late:
        return _end(model, with_run(state, number, run, files), number, run)
    if "a failed save leaves its index" not in model.mutants:
        files.put(model.index(save), None)
    return with_run(state, number, _giving_up(model, run, save), files)
