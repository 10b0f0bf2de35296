"""datastates cat."""

from __future__ import annotations

import json
import math
import pprint
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from megatron_datastates.cli.shared import AsJson, app, binary_size, cannot, notes, progress_bar, say
from megatron_datastates.convert.contents import Content, converted, find_content
from megatron_datastates.convert.npy import write_npy
from megatron_datastates.convert.slices import Slice, parse_slice
from megatron_datastates.convert.source import Source, open_source
from megatron_datastates.errors import DataStatesError, MismatchError, OptionError
from megatron_datastates.format.values import element_bytes
from megatron_datastates.providers.objects import deserialize

_MOST_PRINTED = 1 << 20  # elements
_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@app.command()
def cat(
    directory: Annotated[Path, typer.Argument(help="A checkpoint of any format.")],
    key: Annotated[str, typer.Argument(help="Of a tensor, an object, or an optimizer state of a parameter.")],
    part: Annotated[str, typer.Argument(metavar="[SLICE]", help="As in numpy: 0:2,:,5")] = "",
    target: Annotated[Path | None, typer.Option("--out", help="Write a new .npy file instead.")] = None,
    dtype: Annotated[str, typer.Option("--as", help="Convert to float32 or float64.")] = "",
    as_json: AsJson = False,
) -> None:
    """Print a tensor, a slice of one, or an object; or write a tensor to a .npy file.

    numpy has no bfloat16 and no 8-bit floats: without --as float32 their raw bits are written.

    Exit codes: 0 done, 2 there is no such thing, or it cannot be read or written: then nothing was written.

    Example: datastates cat runs/gpt/iter_0001000 embedding.word_embeddings.weight 0:2,:8
    """
    try:
        source, wanted_dtype = open_source(directory), _dtype(dtype)
        if key in source.objects and key not in source.tensors:
            _cat_object(source, key, refused=bool(part or target or dtype), as_json=as_json)
            return
        content = find_content(source, key)
        wanted = parse_slice(part, content.global_shape)
        if target is not None:
            _write(target, content, wanted, wanted_dtype)
        else:
            _print_tensor(content, wanted, wanted_dtype, as_json)
    except (DataStatesError, OSError) as error:
        cannot(error)


def _dtype(name: str) -> torch.dtype | None:
    if name and name not in _DTYPES:
        raise OptionError(f"--as takes float32 or float64, not {name!r}")
    return _DTYPES.get(name)


def _cat_object(source: Source, key: str, refused: bool, as_json: bool) -> None:
    if refused:
        raise OptionError(f"{key!r} is an object: a slice, --out and --as are for tensors")
    value = deserialize(source.read_object(key), key)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]  # Megatron's objects are one-element arrays
    if as_json:
        print(json.dumps({"key": key, "value": value}, default=repr))
    else:
        say(value if isinstance(value, str) else pprint.pformat(value, width=110))


def _write(target: Path, content: Content, wanted: Slice, dtype: torch.dtype | None) -> None:
    size = math.prod(wanted.shape) * element_bytes(content.dtype)
    with progress_bar("reading") as progress:
        task = progress.add_task("", total=size)
        written = write_npy(target, content, wanted, dtype, lambda done: progress.advance(task, done))
    name = str(written).removeprefix("torch.")
    raw = f" (the raw bits of {content.dtype})" if dtype is None and name != content.dtype else ""
    notes.print(f"{target}: {list(wanted.kept_shape)}, {name}{raw}", soft_wrap=True)


def _print_tensor(content: Content, wanted: Slice, dtype: torch.dtype | None, as_json: bool) -> None:
    elements = math.prod(wanted.shape)
    if elements > _MOST_PRINTED:
        raise MismatchError(
            f"{content.key!r} has {elements} elements there ({binary_size(content.bytes)} in all): give a "
            "slice such as 0:4, or --out FILE.npy"
        )
    values = content.read(wanted.offset, wanted.shape).reshape(wanted.kept_shape)
    if dtype is not None:
        values = converted(values, dtype)
    if as_json:
        name = str(values.dtype).removeprefix("torch.")
        row = {
            "key": content.key,
            "dtype": name,
            "shape": values.shape,
            "values": _jsonable(_readable(values)),
        }
        print(json.dumps(row))
    else:
        say(f"{content.key}: {content.dtype}, {list(content.global_shape)}")
        say(str(_readable(values)))


def _readable(values: torch.Tensor) -> torch.Tensor:
    """What torch can print: not all dtypes."""
    if values.dtype.itemsize == 1 and values.dtype.is_floating_point:
        return values.view(torch.uint8) if "float4" in str(values.dtype) else values.to(torch.float32)
    return values


def _jsonable(values: torch.Tensor) -> Any:
    """Nested lists. JSON has no NaN, no infinity and no complex numbers: they are text."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(one) for one in value]
        if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
            return str(value)
        return value

    return plain(values.tolist())
