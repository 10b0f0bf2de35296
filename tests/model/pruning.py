"""The steps of `datastates prune` in the model: removing a checkpoint, and removing left-overs.

The names of the steps are those of pipeline/upkeep/prune.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.files import MANIFEST, OLD, REMOVAL, Files, save_of
from tests.model.state import Model, Prune, State


def _is_old(model: Model, state: State, name: str) -> bool:
    """Returns whether prune takes a file for old: no save that may still publish has such files."""
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


def prune_steps(model: Model, state: State) -> Iterator[tuple[str, State]]:
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
            return  # the checkpoint to remove is the old one
        if any(not _is_old(model, state, name) for name in _unnamed(model, files)):
            return  # it is kept for now
        after = prune._replace(at="rename", decided=OLD, todo=tuple(files.listed()))
        state = state._replace(vouched="" if state.vouched == OLD else state.vouched)
        yield "prune: decides to remove the checkpoint", _pruned(state, after, files)
    elif prune.at == "rename":
        if files.get(MANIFEST) is not None:
            files.rename(MANIFEST, REMOVAL)
        yield "prune: renames the manifest", _pruned(state, prune._replace(at="compare"), files)
    elif prune.at == "compare":
        taken = save_of(files.get(REMOVAL))
        if taken == prune.decided or "prune does not read what it renamed" in model.mutants:
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
        if "prune removes what it has not listed" in model.mutants:
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
