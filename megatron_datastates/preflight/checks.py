"""The results of a preflight, of one rank and of all of them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence

from megatron_datastates.errors import DataStatesError, describe_error


class Verdict(enum.IntEnum):
    """What a check has found; of several, the largest counts."""

    OK = 0
    NOTE = 1  # works, and is worth knowing
    FAILED = 2


@dataclasses.dataclass(frozen=True)
class Check:
    """One result, for people.

    Attributes:
        name: what was looked at, the same on all ranks.
    """

    name: str
    verdict: Verdict
    text: str


def ok(name: str, text: str) -> Check:
    """Returns a good result."""
    return Check(name, Verdict.OK, text)


def noted(name: str, text: str) -> Check:
    """Returns the result of what works, and is worth knowing."""
    return Check(name, Verdict.NOTE, text)


def failed(name: str, text: str) -> Check:
    """Returns the result of what does not work."""
    return Check(name, Verdict.FAILED, text)


def tried(name: str, attempt: Callable[[], Check]) -> Check:
    """Returns what an attempt returns, or why it has failed."""
    try:
        return attempt()
    except (DataStatesError, OSError) as error:
        return failed(name, describe_error(error))


def merged(of_ranks: Sequence[Iterable[Check]], nodes: Sequence[str], *, alike: bool = False) -> list[Check]:
    """Returns the checks of all ranks, each name once.

    Where ranks have found different things, the text is that of the first one with the worst verdict, with
    its rank and node.

    Args:
        alike: good results are expected to be the same on all ranks; if they are not, that is noted.
    """
    found: dict[str, list[tuple[int, Check]]] = {}
    for rank, checks in enumerate(of_ranks):
        for check in checks:
            found.setdefault(check.name, []).append((rank, check))
    return [_merged(of_name, nodes, alike) for of_name in found.values()]


def _merged(of_name: list[tuple[int, Check]], nodes: Sequence[str], alike: bool) -> Check:
    rank, worst = max(of_name, key=lambda pair: pair[1].verdict)  # of equal ones, the first
    if len({check.text for _, check in of_name}) == 1:
        return worst
    if worst.verdict is Verdict.OK and alike:
        other = next(pair for pair in of_name if pair[1].text != worst.text)
        texts = [f"{check.text} (rank {at} on node {nodes[at]})" for at, check in ((rank, worst), other)]
        return noted(worst.name, f"ranks differ: {'; '.join(texts)}")
    count = sum(check.verdict is worst.verdict for _, check in of_name)
    where = f"rank {rank} on node {nodes[rank]}"
    if worst.verdict is not Verdict.OK:
        where = f"{count} of {len(nodes)} ranks, first {where}"
    return dataclasses.replace(worst, text=f"{worst.text} ({where})")
