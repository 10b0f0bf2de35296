"""The savers of a process: one for each set of options, made on demand and closed when the interpreter ends.

Savers whose options differ in nothing that an engine knows share the engine of the first of them. Of savers
that have nothing to do, the last few are kept.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import threading
import time
from pathlib import Path
from typing import TypeVar

from megatron_datastates.config import Options
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.session import SaveSession

_KEPT_IDLE = 4  # savers without unfinished saves: of those with engines of their own, and of the others

AnySaver = TypeVar("AnySaver", bound=Saver)
_savers: dict[tuple[type[Saver], Options], Saver] = {}
_sessions: list[SaveSession] = []  # at most one
_closes_early = False


def _forget() -> None:
    """Forgets all savers, in a forked child: their engines and files belong to the parent."""
    _savers.clear()
    _sessions.clear()


os.register_at_fork(after_in_child=_forget)


def saver_for(options: Options) -> Saver:
    """Returns the process's Saver with these options; it is closed when the interpreter ends."""
    return kept_saver(Saver, options, _session())


def _session() -> SaveSession:
    if not _sessions:
        _sessions.append(SaveSession())
    return _sessions[0]


def agree(options: Options) -> None:
    """Has the ranks of this world agree now, instead of in their first save, as SaveSession.agree."""
    session = _session()
    with session.turn.lock:
        session.enter_world()
        session.agree(options)


def directories_at_work() -> list[Path]:
    """Returns the directories in which this process's saves may yet change something. On any thread."""
    return _session().directories_at_work()


def kept_saver(kind: type[AnySaver], options: Options, session: SaveSession) -> AnySaver:
    """Returns the process's saver of this kind with these options, or makes it with this session."""
    if not _savers:
        atexit.unregister(close_all)
        atexit.register(close_all)
    saver = _savers.get((kind, options))
    if saver is None:
        _close_idle(kind)
        made = kind(
            options,
            session,
            engine_owner=_engine_owner(kind, options),
            before_object_store=_close_before_pools,
        )
        # After its owner: close_all begins with the last one. Another thread may have been faster.
        saver = _savers.setdefault((kind, options), made)
    assert isinstance(saver, kind)
    saver.used_at = time.monotonic()
    return saver


def _engine_owner(kind: type[Saver], options: Options) -> Saver | None:
    """Returns a saver with an engine such as these options ask for, if there is one.

    Faults are counted by each engine. Savers of other kinds start saves on several threads at once.
    """
    if kind is not Saver or options.faults:
        return None
    wanted = options.of_engine()
    return next(
        (
            saver
            for (other, theirs), saver in list(_savers.items())
            if other is kind and saver.engine_owner is None and theirs.of_engine() == wanted
        ),
        None,
    )


def _close_idle(kind: type[Saver]) -> None:
    """Closes savers of this kind that have nothing to do, but for the ones used last and owners of engines.

    A program may save with other options each time, such as a report file for each checkpoint.
    """
    for shares in (True, False):
        savers = list(_savers.items())
        owners = {saver.engine_owner for _, saver in savers}
        group = [
            (key, saver)
            for key, saver in savers
            if key[0] is kind and (saver.engine_owner is not None) is shares and saver not in owners
        ]
        for key, saver in sorted(group, key=lambda one: one[1].used_at)[:-_KEPT_IDLE]:
            if saver.close_if_idle():
                _savers.pop(key, None)


def _close_before_pools() -> None:
    """Has savers closed while pools of threads still work, which clients of object stores need to drain.

    Not those of another kind: their saves run on threads of such pools, which Python joins
    (external_ranks.py).

    The functions of `atexit` come after concurrent.futures has ended its pools. Hooks of `threading` are
    called in the opposite order of their registration, so this one comes before that of concurrent.futures.
    """
    global _closes_early
    if not _closes_early:
        importlib.import_module("concurrent.futures.thread")
        register = getattr(threading, "_register_atexit", atexit.register)  # a private function of Python's
        register(functools.partial(close_all, Saver))
        _closes_early = True


def finish_objects() -> None:
    """Waits until what goes to object stores is there. Near tiers say what is not."""
    for saver in list(_savers.values()):  # other threads may make some meanwhile
        if saver.near is not None:
            saver.near.drain.finish_objects()


def close_all(kind: type[Saver] | None = None) -> None:
    """Closes every saver of this process, or those of one kind. Other threads may make some meanwhile."""
    while keys := [key for key in list(_savers) if kind in (None, key[0])]:
        saver = _savers.pop(keys[-1], None)  # another thread may have closed it
        if saver is not None:
            saver.close()
