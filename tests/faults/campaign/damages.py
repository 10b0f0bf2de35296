"""Single damages of a checkpoint, drawn from random numbers. Each replaces a file, and never writes into one.

A checkpoint that is to be damaged consists of links to the files of a sound one.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

from tests.faults.campaign.regions import MANIFEST, METADATA, Region


@dataclasses.dataclass(frozen=True)
class Damage:
    """What was done. `kind` is counted; `files` are those that a refusal may name."""

    kind: str
    text: str
    files: tuple[str, ...]
    area: str = ""  # of bytes in a file


@dataclasses.dataclass(frozen=True)
class Victim:
    """A checkpoint to be damaged, and what it is made of."""

    directory: Path
    regions: list[Region]
    others: list[Path]  # sound checkpoints, from which files are taken
    sound: Path  # what this one is a copy of

    def names(self) -> list[str]:
        return sorted(os.listdir(self.directory))

    def bytes_of(self, name: str) -> bytes:
        return (self.sound / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self.directory / name).unlink()
        (self.directory / name).write_bytes(data)


Do = Callable[[Victim, random.Random], Damage]


def role(name: str) -> str:
    """Returns what a file is in its checkpoint."""
    if name.startswith("data-"):
        return "data file"
    return "index" if name.startswith("index-") else {MANIFEST: "manifest", METADATA: "metadata.json"}[name]


# -- bytes ----------------------------------------------------------------------------------------------


def _run(region: Region, rng: random.Random) -> tuple[int, int]:
    begin = rng.randrange(region.begin, region.end)
    return begin, min(begin + rng.choice([1, 2, 4, 8, 64, 5000]), region.end)


def _bit(old: bytes, rng: random.Random) -> bytes:
    return bytes([old[0] ^ 1 << rng.randrange(8)]) + old[1:]


def _byte(old: bytes, rng: random.Random) -> bytes:
    return bytes([old[0] ^ rng.randrange(1, 256)]) + old[1:]


def _bytes(old: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(len(old))


def _zeros(old: bytes, rng: random.Random) -> bytes:
    return bytes(len(old))


def _ones(old: bytes, rng: random.Random) -> bytes:
    return b"\xff" * len(old)


def _next_number(old: bytes, rng: random.Random) -> bytes:
    """Adds or subtracts one where a number is: what damage rarely looks like, and a forger's favourite."""
    step = rng.choice([1, -1])
    return ((int.from_bytes(old, "little") + step) % (1 << 8 * len(old))).to_bytes(len(old), "little")


EDITS = {
    "a bit flipped": _bit,
    "a byte changed": _byte,
    "a run of random bytes": _bytes,
    "zeros": _zeros,
    "0xff": _ones,
    "a number one off": _next_number,
}


def edit(victim: Victim, rng: random.Random) -> Damage:
    """Changes bytes in one region. Each class of region is as likely as any other."""
    what = rng.choice(sorted({region.what for region in victim.regions}))
    region = rng.choice([region for region in victim.regions if region.what == what])
    data = victim.bytes_of(region.file)
    begin, end, how, new = next(filter(None, (_edited(data, region, rng) for _ in itertools.count())))
    victim.put(region.file, data[:begin] + new + data[end:])
    text = f"{how} at [{begin}, {end}) of {region.file} ({what})"
    return Damage(f"{how}: {role(region.file)}", text, (region.file,), what.split(":")[0])


def _edited(data: bytes, region: Region, rng: random.Random) -> tuple[int, int, str, bytes] | None:
    """Returns where, how, and what is there then; None if it is what was there before."""
    begin, end = _run(region, rng)
    how = rng.choice(sorted(EDITS))
    new = EDITS[how](data[begin:end], rng)
    return (begin, end, how, new) if new != data[begin:end] else None


# -- sizes ----------------------------------------------------------------------------------------------


def truncate(victim: Victim, rng: random.Random) -> Damage:
    """Cuts a file off at, before or after a boundary of any region, or anywhere."""
    region = rng.choice(victim.regions)
    data = victim.bytes_of(region.file)
    at = rng.choice(
        [region.begin, region.end, region.begin - 1, region.begin + 1, 0, 1, rng.randrange(len(data))]
    )
    at = min(max(at, 0), len(data) - 1)
    victim.put(region.file, data[:at])
    return Damage(f"truncated: {role(region.file)}", f"{region.file} cut off at {at}", (region.file,))


def extend(victim: Victim, rng: random.Random) -> Damage:
    name = rng.choice(victim.names())
    data = victim.bytes_of(name)
    more = rng.choice(
        [b"\0", bytes(4096), rng.randbytes(rng.randint(1, 5000)), data, data[-4096:], b"\n", b"{}"]
    )
    victim.put(name, data + more)
    return Damage(f"extended: {role(name)}", f"{name} with {len(more)} more bytes", (name,))


def shift(victim: Victim, rng: random.Random) -> Damage:
    """Removes or doubles bytes within a file."""
    region = rng.choice(victim.regions)
    data = victim.bytes_of(region.file)
    begin, end = _run(region, rng)
    is_lost = rng.random() < 0.5
    victim.put(region.file, data[:begin] + data[end:] if is_lost else data[:end] + data[begin:])
    text = f"[{begin}, {end}) of {region.file} {'lost' if is_lost else 'doubled'}"
    return Damage(f"bytes lost or doubled: {role(region.file)}", text, (region.file,))


# -- whole files ----------------------------------------------------------------------------------------


def swap(victim: Victim, rng: random.Random) -> Damage:
    """Replaces one or two files by those of another save, or of another rank, under their own names."""
    names = rng.sample(victim.names(), rng.choice([1, 1, 2]))
    source = rng.choice([*victim.others, victim.sound])
    reported = []
    for name in names:
        found = [each for each in sorted(os.listdir(source)) if role(each) == role(name)]
        if source == victim.sound:
            found = [each for each in found if each != name] or sorted(os.listdir(source))
        other = rng.choice(found)
        victim.put(name, (source / other).read_bytes())
        reported.append(f"{name} is {other} of {source.name}")
    kind = "of another rank or role" if source == victim.sound else "of another save"
    return Damage(f"{len(names)} swapped, {kind}", "; ".join(reported), tuple(names))


def mix(victim: Victim, rng: random.Random) -> Damage:
    """Replaces all files but one by another save's, under this one's names, with or without the manifest."""
    source = rng.choice(victim.others)
    kept = rng.choice(victim.names())
    others = sorted(os.listdir(source))
    for name in victim.names():
        if name != kept:
            same = [each for each in others if role(each) == role(name)]
            rank = sorted(each for each in victim.names() if role(each) == role(name)).index(name)
            victim.put(name, (source / same[rank]).read_bytes())
    return Damage(
        "all but one of another save",
        f"only {kept} stayed, the rest is {source.name}'s",
        tuple(victim.names()),
    )


def _missing(path: Path, victim: Victim, rng: random.Random) -> None:
    path.unlink()


def _empty(path: Path, victim: Victim, rng: random.Random) -> None:
    path.unlink()
    path.touch()


def _directory(path: Path, victim: Victim, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()
    if rng.random() < 0.5:
        (path / path.name).write_bytes(victim.bytes_of(path.name))


def _symlink(path: Path, victim: Victim, rng: random.Random) -> None:
    path.unlink()
    other = rng.choice(victim.others)
    same = next(name for name in sorted(os.listdir(other)) if role(name) == role(path.name))
    targets = [
        path,
        path.parent,
        Path("/dev/zero"),
        Path("/dev/full"),
        Path("/proc/self/mem"),
        Path("nowhere"),
    ]
    path.symlink_to(rng.choice([*targets, other / same, victim.sound / path.name]))


def _fifo(path: Path, victim: Victim, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _socket(path: Path, victim: Victim, rng: random.Random) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's name is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name[-60:])
    (path.parent / path.name[-60:]).rename(path)
    os.chdir(here)


def _sparse(path: Path, victim: Victim, rng: random.Random) -> None:
    """Makes a file a sparse giant that holds nothing, or its own bytes and then nothing."""
    data = victim.bytes_of(path.name) if rng.random() < 0.5 else b""
    victim.put(path.name, data)
    size = rng.choice([len(victim.bytes_of(path.name)), 300 << 20, (4 << 30) + 1, 1 << 40, 7 << 40])
    os.truncate(path, size)


PUT_IN_PLACE = {
    "missing": _missing,
    "empty": _empty,
    "a directory": _directory,
    "a symbolic link": _symlink,
    "a pipe": _fifo,
    "a socket": _socket,
    "a sparse giant": _sparse,
}


def replace(victim: Victim, rng: random.Random) -> Damage:
    name, how = rng.choice(victim.names()), rng.choice(sorted(PUT_IN_PLACE))
    PUT_IN_PLACE[how](victim.directory / name, victim, rng)
    return Damage(f"{how}: {role(name)}", f"{name} is {how}", (name,))


# One of ten is what a round does, by its number.
TURNS: tuple[Do, ...] = (edit, truncate, edit, swap, edit, replace, edit, shift, edit, extend)
TURNS_OF_MORE: tuple[Do, ...] = (edit, replace, edit, mix, edit, truncate, edit, replace, edit, swap)


def damage(victim: Victim, round_: int, rng: random.Random) -> Damage:
    """Does one damage, chosen by the round's number and its random numbers."""
    turns = (*TURNS, *TURNS_OF_MORE)
    return turns[round_ % len(turns)](victim, rng)
