"""datastates cat."""

from __future__ import annotations

import argparse
import collections
import math
import pprint
import types
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    PATH,
    advancing,
    any_format_argument,
    argument,
    checkpoint_of,
    iteration_option,
    json_option,
    note,
    print_json,
    reported_errors,
    say,
    say_as_is,
)
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.slices import Slice, parse_slice
from megatron_datastates.errors import MismatchError, OptionError
from megatron_datastates.format.values import element_bytes
from megatron_datastates.units import size_text

if TYPE_CHECKING:
    import torch

    from megatron_datastates.convert.contents import Content
    from megatron_datastates.convert.sources.source import Source

_MOST_PRINTED = 1 << 20  # elements of a tensor, values of an object
_DEEPEST = 1000  # level of an object that is looked at; Python's own limit is near


# A slice may begin with a minus sign, and must not be taken for an option.
@app.command(context_settings={"ignore_unknown_options": True})
@any_format_argument
@argument(
    "key",
    help="A tensor, object or optimizer state, as `datastates show` lists it, or one layer's tensor "
    "(decoder.layers.3.mlp...).",
)
@argument("part", metavar="[SLICE]", default="", help="A slice, as in numpy: 0:2,:,5")
@click.option(
    "--out",
    "target",
    metavar="FILE",
    type=PATH,
    help="Write to this new file (.npy) instead of printing.",
)
@click.option(
    "--as",
    "dtype",
    metavar="DTYPE",
    type=click.Choice(["float32", "float64"]),
    help="Convert the elements to float32 or float64.",
)
@iteration_option
@json_option
def cat(
    directory: Path,
    key: str,
    part: str,
    target: Path | None,
    dtype: str | None,
    iteration: int | None,
    as_json: bool,
) -> None:
    """Print a tensor, a slice, or an object. With --out, write a tensor to a .npy file, or a stream as it is.

    numpy has no bfloat16 and no 8-bit floats: --out writes their raw bits, unless --as converts them. In
    JSON, NaN and infinite elements are strings. Printing an object runs no code of the checkpoint: an
    instance of a class that is not plain data is shown as its attributes.

    Exit codes: 0 done; 1 what was asked for is damaged; 2 no such checkpoint or key, or it cannot be read or
    written. With 1 and 2, nothing was written.

    \b
    Example: datastates cat runs/gpt/iter_0001000 embedding.word_embeddings.weight 0:2,:8
    """
    from megatron_datastates.convert.contents import find_content

    with reported_errors():
        source, wanted_dtype = open_source(checkpoint_of(directory, iteration)), _dtype(dtype)
        source.note_files()
        if key in source.streams and key not in source.tensors and key not in source.objects:
            _cat_stream(source, key, target, refused=bool(part or dtype), as_json=as_json)
            return
        if key in source.objects and key not in source.tensors:
            _cat_object(source, key, refused=bool(part or target or dtype), as_json=as_json)
            return
        content = find_content(source, key)
        wanted = parse_slice(part, content.global_shape)
        if target is not None:
            _write(target, source, content, wanted, wanted_dtype, as_json)
        else:
            _print_tensor(source, content, wanted, wanted_dtype, as_json)


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    import torch

    return torch.float32 if name == "float32" else torch.float64


def _cat_stream(source: Source, key: str, target: Path | None, refused: bool, as_json: bool) -> None:
    """Writes a stream to a file, or describes it: what its bytes mean, only its provider knows."""
    from megatron_datastates.convert.sinks.target import publish_on_exit

    if refused:
        raise OptionError(f"{key!r} is a stream; a slice and --as apply to tensors only")
    size = source.stream_bytes(key)
    if target is not None:
        with publish_on_exit(target) as temporary, open(temporary, "xb") as file:
            for buffer in source.open_stream(key):
                file.write(buffer)
        if as_json:
            print_json({"target": str(target), "key": key, "bytes": size})
        else:
            note(f"{target}: {size_text(size)}")
    elif as_json:
        print_json({"key": key, "bytes": size})
    else:
        say(f"{key}: a stream of {size_text(size)}; --out FILE writes it to a file")


def _cat_object(source: Source, key: str, refused: bool, as_json: bool) -> None:
    from megatron_datastates.providers.objects import deserialize_for_display

    if refused:
        raise OptionError(f"{key!r} is an object; a slice, --out and --as apply to tensors only")
    data = source.read_object(key)
    source.require_unchanged()
    value = deserialize_for_display(data, key, _stand_in)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]  # Megatron's objects are one-element arrays
    _require_few_values(key, value)
    try:
        if as_json:
            print_json({"key": key, "value": _jsonable(value)})
        else:
            say_as_is(value if isinstance(value, str) else pprint.pformat(value, width=80))
    except (RecursionError, ValueError) as error:  # nested too deeply; a number too long for a text
        raise OptionError(f"object {key!r} cannot be shown: {error}") from error


def _require_few_values(key: str, value: Any) -> None:
    """Raises OptionError if an object has too many values to be printed, each as often as it is referred to.

    A list that holds one list twice, which holds one twice, and so on, has 2^n values in n lists.
    """
    left, count = [iter([value])], 0
    while left:
        for item in left[-1]:
            count += _printed_values(item)
            if count > _MOST_PRINTED:
                raise OptionError(
                    f"object {key!r} has more than {_MOST_PRINTED} values, each as often as it would be "
                    "printed: load it in a program, with megatron_datastates.open"
                )
            inner = _values_in(item)
            if inner and len(left) < _DEEPEST:
                left.append(iter(inner))
                break
        else:
            left.pop()


def _printed_values(item: Any) -> int:
    """Returns 1 or, of a tensor, roughly how many elements torch prints: at most six along each axis.

    An expanded tensor may have any number of elements, along any number of axes.
    """
    shape = getattr(item, "shape", ()) if type(item).__module__.startswith("torch") else ()
    return math.prod(min(length, 6) for length in shape)


def _values_in(item: Any) -> Collection[Any]:
    if isinstance(item, types.SimpleNamespace | argparse.Namespace):
        item = vars(item)
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list | tuple | set | frozenset | collections.deque) else ()


def _stand_in(name: str) -> type:
    """Makes a stand-in for a class that is not trusted: it keeps arguments and attributes and has no code.

    Args:
        name: the class's module and name, joined by a dot.
    """

    def make(kind: type, *arguments: Any) -> types.SimpleNamespace:
        made: types.SimpleNamespace = types.SimpleNamespace.__new__(kind)
        if arguments:
            made.arguments = arguments
        return made

    def initialize(self: types.SimpleNamespace, *arguments: Any) -> None:
        """Takes the arguments that `make` has kept: an unpickler may call only that one."""

    def set_state(self: types.SimpleNamespace, state: Any) -> None:
        named = isinstance(state, dict) and all(isinstance(key, str) for key in state)
        vars(self).update(state if named else {"state": state})

    module, _, own = name.rpartition(".")
    members = {
        "__new__": make,
        "__init__": initialize,
        "__setstate__": set_state,
        "__hash__": object.__hash__,
        "__module__": module,
    }
    return type(own, (types.SimpleNamespace,), members)


def _write(
    target: Path,
    source: Source,
    content: Content,
    wanted: Slice,
    dtype: torch.dtype | None,
    as_json: bool,
) -> None:
    from megatron_datastates.convert.sinks.npy import write_npy

    size = math.prod(wanted.shape) * element_bytes(content.dtype)
    with advancing("reading", size) as progress:
        written = write_npy(target, content, wanted, dtype, progress, source.require_unchanged)
    name = str(written).removeprefix("torch.")
    if as_json:
        print_json({"target": str(target), "key": content.key, "dtype": name, "shape": wanted.kept_shape})
        return
    raw = f" (the raw bits of {content.dtype})" if dtype is None and name != content.dtype else ""
    format = "" if target.suffix == ".npy" else ", in the format of .npy files"
    note(f"{target}: {list(wanted.kept_shape)}, {name}{raw}{format}")


def _print_tensor(
    source: Source, content: Content, wanted: Slice, dtype: torch.dtype | None, as_json: bool
) -> None:
    from megatron_datastates.convert.contents import convert_dtype

    elements = math.prod(wanted.shape)
    if elements > _MOST_PRINTED:
        raise MismatchError(
            f"{content.key!r}: {elements} elements are too many to print (at most {_MOST_PRINTED}; the whole "
            f"tensor has {size_text(content.bytes)}): add a slice such as 0:4, or --out FILE.npy"
        )
    values = content.read(wanted.offset, wanted.shape).reshape(wanted.kept_shape)
    source.require_unchanged()
    if dtype is not None:
        values = convert_dtype(values, dtype, content.key)
    if as_json:
        name = str(values.dtype).removeprefix("torch.")
        row = {
            "key": content.key,
            "dtype": name,
            "shape": values.shape,
            "values": _jsonable(_readable(values).tolist()),
        }
        print_json(row)
    else:
        say(f"{content.key}: {content.dtype}, {list(content.global_shape)}")
        say_as_is(str(_readable(values)))


def _readable(values: torch.Tensor) -> torch.Tensor:
    """Converts 8-bit floats, which torch cannot print, to dtypes that it can."""
    import torch

    if values.dtype.itemsize == 1 and values.dtype.is_floating_point:
        return values.view(torch.uint8) if "float4" in str(values.dtype) else values.to(torch.float32)
    return values


def _jsonable(value: Any) -> Any:
    """Replaces what JSON cannot express (NaN, infinity, complex numbers, classes) by text.

    A dictionary becomes a list of pairs if two of its keys are the same as text, such as 1 and "1".
    """
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):  # stand-ins are SimpleNamespaces
        return _jsonable(vars(value))
    if isinstance(value, dict):
        names, values = [str(key) for key in value], [_jsonable(one) for one in value.values()]
        if len(set(names)) == len(names):
            return dict(zip(names, values, strict=True))
        return [[_jsonable(key), one] for key, one in zip(value, values, strict=True)]
    if isinstance(value, list | tuple):
        return [_jsonable(one) for one in value]
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else repr(value)
