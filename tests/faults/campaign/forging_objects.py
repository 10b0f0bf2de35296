"""Hostile pickles in archives as torch.save makes them: programs that would run code, or take all memory."""

from __future__ import annotations

import functools
import io
import pickle
import struct
import zipfile
from typing import Any

from hypothesis import strategies as st

from tests.faults.campaign import forging
from tests.faults.campaign.forging import Draw, Forgery
from tests.unit.stored_objects import stored
from tests.unit.test_hostile_objects import HOSTILE, nested_key, number, text

CANARY = "canary"  # a folder in the working directory: whatever makes it has run code of a checkpoint
NAMES = (
    """
os mkdir, posix mkdir, os system, posix system, nt system, subprocess Popen, subprocess call,
builtins exec, builtins eval, builtins getattr, builtins __import__, builtins open, __builtin__ map,
builtins type, builtins bytearray, __builtin__ apply, functools partial, operator attrgetter,
operator methodcaller, importlib import_module, runpy _run_code, pickle loads, _pickle loads,
torch load, torch.hub load, torch._utils _rebuild_tensor_v2, torch.storage _load_from_bytes,
torch Tensor, torch.nn.modules.linear Linear, numpy load, numpy fromfile,
numpy.core.multiarray _reconstruct, numpy._core.multiarray scalar, numpy ndarray, numpy dtype,
numpy.testing._private.utils runstring, collections OrderedDict, collections defaultdict,
collections Counter, collections deque, argparse Namespace, argparse FileType,
types SimpleNamespace, types FunctionType, types CodeType, datetime datetime, decimal Decimal,
uuid UUID, pathlib Path, pathlib PosixPath, enum Enum, _codecs encode, copyreg _reconstructor,
copyreg add_extension, megatron_datastates.files open_regular, megatron.core.enums ModelType,
signal Signals, torch._C Generator, torch.serialization add_safe_globals, logging.config listen,
ctypes CDLL, code interact, pty spawn
""".replace("\n", " ")
    .strip()
    .split(", ")
)
ARGUMENTS = st.sampled_from(
    [
        text(CANARY.encode()),
        text(b"mkdir " + CANARY.encode()),
        text(f"import os; os.mkdir('{CANARY}')".encode()),
        text(f"__import__('os').mkdir('{CANARY}')".encode()),
        text(b"../outside/secret"),
        text(b"w"),
        b"N",
        b"K\x05",
        number(1 << 40),
        number(-1),
        b")",
        b"]",
        b"}",
        b"\x88",
        text(b"os"),
        text(b"mkdir"),
        text(b"V8"),
        text(b"latin1"),
    ]
)


def _name(draw: Draw) -> bytes:
    module, name = draw(st.sampled_from(NAMES)).split(" ")
    how = draw(st.sampled_from(["global", "global", "stack"]))
    if how == "global":
        return f"c{module}\n{name}\n".encode()
    return text(module.encode()) + text(name.encode()) + b"\x93"


def _call(draw: Draw) -> bytes:
    """Returns a value on the stack that a call, or a call of its parts, has made."""
    arguments = b"".join(
        draw(ARGUMENTS) if draw(st.integers(0, 3)) else _name(draw) for _ in range(draw(st.integers(0, 3)))
    )
    how = draw(
        st.sampled_from(["reduce", "reduce", "new", "inst", "obj", "build", "new with names", "twice"])
    )
    name = _name(draw)
    if how == "inst":
        return b"(" + arguments + b"i" + name[1:] if name.startswith(b"c") else name
    if how == "obj":
        return b"(" + name + arguments + b"o"
    if how == "build":
        state = b"}" + text(b"__setstate__") + _name(draw) + b"s"
        return name + state + b"b"
    if how == "new with names":
        return name + b"(" + arguments + b"t}\x92"
    code = b"\x81" if how == "new" else b"R"
    made = name + b"(" + arguments + b"t" + code
    return made + b"(" + draw(ARGUMENTS) + b"tR" if how == "twice" else made


def _soup(draw: Draw) -> bytes:
    """Opcodes in any order."""
    codes = [bytes([code]) for code in range(256)]
    parts = st.one_of(st.sampled_from(codes), ARGUMENTS, st.binary(max_size=4))
    return b"".join(draw(st.lists(parts, max_size=25)))


def _bomb(draw: Draw) -> bytes:
    doubling = b"".join(b"q\x01h\x01\x86" for _ in range(draw(st.sampled_from([5, 60, 2000]))))
    lists = b"]q\x01" + b"".join(
        b"]q" + bytes([n + 1]) + (b"h" + bytes([n]) + b"a") * 9 for n in range(1, 60)
    )
    return draw(
        st.sampled_from(
            [
                b"})" + doubling + b"Ns",
                b")" + doubling,
                lists,
                b"\x8d" + struct.pack("<Q", 1 << 50),
                b"]q\x01h\x01a",
                b"}q\x01" + text(b"x") + b"h\x01s",
                b"(" * 200_000,
                b"]" * 100_000 + b"a" * 99_999,
                b")" + b"\x85" * 200_000,
                nested_key(1000, b"\x85")[2:-1],
                b"Nr\xff\xff\xff\x7f",
                b"\x96" + struct.pack("<Q", 1 << 40),
                b"cnumpy\nndarray\n" + number(1 << 40) + b"\x85R",
                b"c__builtin__\nbytes\n" + number(1 << 40) + b"\x85R",
                b"\x8b" + struct.pack("<i", 10_000_000) + b"\x7f" * 1_000,
                b"I" + b"9" * 200_000 + b"\n",
            ]
        )
    )


def program(draw: Draw) -> tuple[str, bytes]:
    """Returns what was made, and a pickle."""
    kind = draw(st.sampled_from(["call", "call", "call", "soup", "bomb", "known", "state"]))
    if kind == "known":
        name = draw(st.sampled_from(sorted(HOSTILE)))
        return name, HOSTILE[name]
    body = {"call": _call, "soup": _soup, "bomb": _bomb, "state": _state}[kind](draw)
    if draw(st.booleans()):
        body = b"](" + body + draw(ARGUMENTS) + b"e"
    protocol = draw(st.sampled_from([b"\x80\x02", b"\x80\x04", b"\x80\x05", b""]))
    return kind, protocol + body + b"."


def _state(draw: Draw) -> bytes:
    """Returns what is honest, with a state that somebody else wrote."""
    values: Any = draw(st.sampled_from([{"a": 1}, [1, 2], {1, 2}, 1.5]))
    return pickle.dumps(values, 2)[2:-1] + _name(draw) + b"b"


def archive(draw: Draw, pickled: bytes) -> bytes:
    """Returns a zip file around it, which may lie, too."""
    buffer = io.BytesIO()
    compression = draw(st.sampled_from([zipfile.ZIP_STORED] * 5 + [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA]))
    name = draw(
        st.sampled_from(["archive/data.pkl"] * 6 + ["data.pkl", "../data.pkl", "/data.pkl", "a/b/data.pkl"])
    )
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr(name, pickled)
        for _ in range(draw(st.integers(0, 3))):
            file.writestr(
                f"archive/data/{draw(st.sampled_from(['0', '1', '../../outside', 'x' * 300]))}", bytes(8)
            )
        if draw(st.integers(0, 4)) == 0:
            file.writestr("archive/byteorder", draw(st.sampled_from([b"little", b"big", b""])))
    data = bytearray(buffer.getvalue())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):  # sizes and places that its own tables state
        at = data.rfind(b"PK\x01\x02") + draw(st.sampled_from([20, 24, 42, 28, 30, 8, 10]))
        data[at : at + 4] = struct.pack("<I", draw(forging.NUMBERS) % (1 << 32))
    return bytes(data)


@functools.cache
def deflated() -> bytes:
    """Returns an archive whose pickle is a text of half a GiB, compressed."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open("archive/data.pkl", "w") as member,
    ):
        member.write(b"\x80\x02X" + struct.pack("<I", 1 << 29))
        for _ in range(512):
            member.write(bytes(1 << 20))
        member.write(b".")
    return buffer.getvalue()


def objects(draw: Draw) -> Forgery:
    """Returns one of the objects of a checkpoint."""
    kind, pickled = program(draw)
    data = archive(draw, pickled)
    if draw(st.integers(0, 15)) == 0:
        kind, data = "deflated bomb", deflated()
    key = draw(st.sampled_from([forging.COMMON_KEY, "o/shard_0_1", forging.MAP_KEY]))
    claims = forging.base({key: data})
    files = forging.data_files(claims)
    reported = f"{kind} as {key}: {pickled[:300]!r}"
    return Forgery("object", reported, forging.assemble(files, forging.index_bytes(claims)), claims)


def sound_values(draw: Draw) -> Forgery:
    """Returns honest objects of an unexpected kind, such as a common state that is no dictionary."""
    values = st.recursive(
        st.none()
        | st.booleans()
        | forging.NUMBERS
        | st.floats()
        | st.text(max_size=5)
        | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    )
    words = st.dictionaries(st.sampled_from(["iteration", "args", "x"]), values, max_size=3)
    key = draw(st.sampled_from([forging.COMMON_KEY, forging.COMMON_KEY, "o/shard_0_1", forging.MAP_KEY]))
    value = draw(
        st.one_of(values, st.lists(values, min_size=1, max_size=2), words.map(lambda found: [found]))
    )
    claims = forging.base({key: stored(value)})
    files = forging.data_files(claims)
    return Forgery(
        "value of an object",
        f"{key} is {value!r}"[:300],
        forging.assemble(files, forging.index_bytes(claims)),
        claims,
    )


FORGERIES = (objects, objects, sound_values, objects)
