"""A whole preflight: the checks in their order, on all ranks that were started."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megatron_datastates.engine.memory import free_bytes, local_ranks
from megatron_datastates.errors import RanksDifferError, SaveFailedError, describe_error
from megatron_datastates.pipeline.saver_pool import close_all
from megatron_datastates.preflight import storage
from megatron_datastates.preflight.checks import Check, Verdict, failed, merged, ok, tried
from megatron_datastates.preflight.ranks import Ranks
from megatron_datastates.preflight.software import software
from megatron_datastates.preflight.trial import KEPT, State, Trial, save_and_load
from megatron_datastates.units import size_text

_MARGIN = 1.1


@dataclasses.dataclass
class Result:
    """What a preflight has found, the same on all ranks.

    Attributes:
        trial: None if a check before it has failed, or a save.
    """

    ranks: int
    nodes: int
    checks: list[Check] = dataclasses.field(default_factory=list)
    trial: Trial | None = None

    @property
    def is_good(self) -> bool:
        return all(check.verdict is not Verdict.FAILED for check in self.checks)


def preflight(
    ranks: Ranks, directory: Path, size: int, saves: int, show: Callable[[str], None] = lambda text: None
) -> Result:
    """Looks at the software, the directory and the ranks, saves some times, and loads. Every rank calls it.

    Args:
        directory: made if it is not there; what is written in it is removed.
        size: bytes of each rank's state.
        saves: how many.
        show: called with what is done next.
    """
    result = Result(ranks.size, ranks.node_count)

    def add(checks: list[Check], *, alike: bool = False) -> bool:
        result.checks += merged(ranks.gathered(checks), ranks.nodes, alike=alike)
        return result.is_good

    show("looking at the software")
    add(software(), alike=True)
    if not add([_memory(ranks.device, size)]):
        return result
    with _folder(ranks, directory) as (folder, trouble):
        if not add([] if trouble is None else [failed("directory", trouble)]):
            return result
        show(f"looking at {directory}")
        token = folder.name
        needed = int(size * ranks.size * min(KEPT, saves) * _MARGIN)
        room = tried("file system", functools.partial(storage.file_system, directory, needed))
        if not add([room, *storage.calls(folder, ranks.rank, token)]):
            return result
        if not add([storage.visibility(folder, ranks.rank, ranks.nodes, token)]):
            return result
        show(f"saving {saves} times, then loading")
        state, short = None, []
        try:
            state = State(ranks.rank, size, ranks.device)
        except RuntimeError as error:  # of torch, on this rank alone
            short = [failed("memory", describe_error(error))]
        if not add(short) or state is None:
            return result
        _try_out(ranks, state, folder, saves, result)
        if result.trial is not None:
            fault = result.trial.fault
            good = (
                "the same bits" if ranks.size == 1 else "the same bits, each rank what another one has saved"
            )
            add([ok("load", good) if fault is None else failed("load", fault)])
    return result


def _try_out(ranks: Ranks, state: State, folder: Path, saves: int, result: Result) -> None:
    try:
        result.trial = save_and_load(ranks, state, folder, saves)
    except (RanksDifferError, SaveFailedError) as error:  # the same on all ranks
        result.checks.append(failed("save", describe_error(error)))
    else:
        result.checks.append(ok("save", f"{saves} of {saves} published"))


def _memory(device: torch.device, size: int) -> Check:
    if device.type == "cuda":
        free, what = torch.cuda.mem_get_info(device)[0], "device"
        needed = 2 * size  # the values that are compared are made there
    else:
        free, what = free_bytes(), "host"
        needed = 2 * size * local_ranks()
    text = f"{size_text(free)} of {what} memory are free"
    if needed > free:
        return failed("memory", f"{text}: expected {size_text(needed)} for this trial; see --size")
    return ok("memory", text)


@contextlib.contextmanager
def _folder(ranks: Ranks, directory: Path) -> Iterator[tuple[Path, str | None]]:
    """Makes a folder for a trial; yields it, and why it could not be made. Removes it at the end."""
    token = ranks.gathered(secrets.token_hex(4))[0]
    folder, trouble = directory / f"datastates-preflight-{token}", None
    made: list[Path] = []

    def make() -> None:
        made.extend(path for path in folder.parents if not path.exists())
        folder.mkdir(parents=True, exist_ok=True)

    try:
        if ranks.rank == 0:
            try:
                make()
            except FileExistsError as error:  # of a file in the path, the error is another
                trouble = f"{error.filename} is a link to what does not exist"
            except OSError as error:
                trouble = describe_error(error)
        trouble = ranks.gathered(trouble)[0]
        if trouble is None:
            with contextlib.suppress(OSError):  # where it is not shared, `visibility` finds out
                make()
        yield folder, trouble
    except BaseException:
        close_all()  # else threads of a save that is under way make its directory again
        shutil.rmtree(folder, ignore_errors=True)  # on each rank: the last one to end leaves nothing
        raise
    finally:
        if ranks.rank == 0 or os.environ.get("LOCAL_RANK") == "0":  # of a node that does not share it
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                for path in made:
                    path.rmdir()
