"""The front door: saving, loading and looking inside, without Megatron (`import megatron_datastates as ds`).

What belongs here: the few calls that a program makes, and nothing that another module needs. What does not:
how a save or a load goes (pipeline/), and what Megatron saves (mcore/).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from megatron_datastates.engine.fence import FENCE, fence
from megatron_datastates.errors import MismatchError, OptionError, SaveFailedError
from megatron_datastates.files import absolute, is_object, path_of
from megatron_datastates.option_calls import options_of_call
from megatron_datastates.pipeline.load_report import reported_load
from megatron_datastates.pipeline.loading.filling import fill
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.restoring import require_stored, restore
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.report import on_report, save_report
from megatron_datastates.pipeline.saver_pool import saver_for
from megatron_datastates.pipeline.saving.held import trainer_held
from megatron_datastates.providers.base import Mutability, StateProvider
from megatron_datastates.providers.named import Shard, is_empty, map_leaves, named_values, nested, tree_of

__all__ = ["SaveHandle", "Shard", "async_save", "fence", "load", "on_report", "open", "save"]

State = Mapping[Any, Any]
Report = dict[str, Any]
StrPath = str | os.PathLike[str]
P = ParamSpec("P")
T = TypeVar("T")


def _uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Lets code that torch.compile has compiled call a function, which it cannot compile itself.

    The compiler is not imported for it, which takes seconds.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" in sys.modules:
            return _disabled(function)(*args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call


@functools.cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


class SaveHandle:
    """A save under way."""

    def __init__(self, publication: Publication, mode: str) -> None:
        self._publication = publication
        self._mode = mode

    @property
    def directory(self) -> Path:
        return self._publication.save.context.directory

    @_uncompiled
    def done(self) -> bool:
        """Takes one step of the save and returns whether it is over. Every rank has to ask equally often.

        A program asks about once an iteration: nothing is published before all ranks have asked a few times.
        """
        return self._publication.poll() is not Outcome.PENDING

    @_uncompiled
    def wait(self) -> Report:
        """Waits until the checkpoint is published; returns the report. Every rank calls it.

        Raises:
            SaveFailedError: the save failed on some rank; all ranks raise the same text.
        """
        with trainer_held("wait", self._publication.save):
            self._publication.wait()
        return self._result()

    def _result(self) -> Report:
        if self._publication.outcome is Outcome.FAILED:
            raise SaveFailedError(self._publication.error) from self._publication.save.cause
        return save_report(self._publication, self._mode)

    @property
    def report(self) -> Report | None:
        """What the save cost (times in milliseconds, sizes in bytes); None before it is over."""
        is_over = self._publication.outcome is not Outcome.PENDING
        return save_report(self._publication, self._mode) if is_over else None


@_uncompiled
def save(state: State, directory: StrPath, *, iteration: int | None = None, **options: Any) -> Report:
    """Saves nested mappings of tensors and objects; returns when the checkpoint is published.

    Values are stored under names: the keys on the way to them, joined by dots. A value that is a state
    provider (megatron_datastates.providers) yields entries under its name. Under torch.distributed every rank
    calls it with its own part: a tensor that several ranks hold in parts is a `Shard` on each of them, and
    everything else is passed by one rank only.

    Args:
        state: for example `{"model": model.state_dict(), "step": 7}`. Tensors are strided, on the host or on
            a CUDA device, of any shape, and of any dtype but quantized ones and those whose elements have
            less than a byte or no meaning (`uint4`, `bits8`); a DTensor is passed as a `Shard` of its local
            tensor. Everything else is an object: plain data of Python, numpy and torch.
        directory: of the checkpoint; made if it is not there. What was published in it stays complete until
            the new checkpoint takes its place.
        iteration: the training iteration, for people.
        options: fields of megatron_datastates.config.Options, as values (`staging_memory=2 << 30`) or as
            text (`staging_memory="2GiB"`, `checksums="off"`); the rest comes from the environment.

    Returns:
        The report of the save, as `SaveHandle.report`.

    Raises:
        SaveFailedError: the save failed on some rank. Nothing was published; all ranks raise the same text.
        OptionError: an option that does not exist, or makes no sense.
        RanksDifferError: in the first save, if ranks run other releases, or differ in options that all need
            alike; all ranks raise the same text.
    """
    with trainer_held("save"):
        handle = _start(state, directory, iteration, "sync", Mutability.NOW, options)
        handle._publication.wait()
    return handle._result()  # with all of the time


@_uncompiled
def async_save(
    state: State, directory: StrPath, *, iteration: int | None = None, lazy: bool = False, **options: Any
) -> SaveHandle:
    """Starts a save and returns as soon as the program may go on; arguments as in `save`.

    Args:
        lazy: False copies everything before this returns, so that the state may change at once, except what
            state providers promise not to change. True is a promise that tensors change, and release their
            memory, in steps of torch's optimizers only, or after a call of `fence()`: they are copied
            meanwhile, and those wait for what is left.

    Returns:
        A handle with `done`, `wait` and `report`. Errors, too, are raised by its `wait`.

    Raises:
        OptionError: an option that does not exist, or makes no sense.
        RanksDifferError: in the first save, if ranks run other releases, or differ in options that all need
            alike; all ranks raise the same text.
    """
    if lazy:
        _install_fences()
    mutability = Mutability.AT_FENCE if lazy else Mutability.NOW
    handle = _start(state, directory, iteration, "async", mutability, options)
    if not lazy and FENCE.has_saves:  # a state provider has promised as much as `lazy` does
        _install_fences()
    return handle


def _install_fences() -> None:
    """Lets steps of torch's optimizers wait for copies. The first call imports torch's compiler."""
    from megatron_datastates.mcore.fences import install

    install()


def _start(
    state: State,
    directory: StrPath,
    iteration: int | None,
    mode: str,
    mutability: Mutability,
    options: dict[str, Any],
) -> SaveHandle:
    _check_path(directory)
    if "://" in os.fspath(directory) and not is_object(directory):
        raise OptionError(
            f"{directory}: expected a directory of a file system; only Megatron's training loop saves to "
            "object stores"
        )
    saver = saver_for(options_of_call(options, "save"))
    with trainer_held("start"):
        publication = saver.start(
            path_of(directory), lambda: tree_of(state, mutability), iteration=iteration, mode=mode
        )
    return SaveHandle(publication, mode)


def _check_path(directory: object) -> None:
    """Raises OptionError for what names no directory in any file system."""
    text = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(text, str) or "\0" in text:
        raise OptionError(f"expected a directory as a str or a pathlib.Path, found {directory!r}")


@_uncompiled
def load(directory: StrPath, into: State | None = None, **options: Any) -> dict[Any, Any]:
    """Loads a checkpoint, every byte checked. Communicates with no other rank.

    Args:
        directory: of a published checkpoint, `iter_0001000` of a Megatron run included.
        into: nested mappings as for `save`, on any number of ranks. Tensors and the tensors of `Shard`s are
            filled in place, whatever the sharding they were saved with; their shapes are those that were
            saved, their dtypes and devices may differ. State providers restore themselves. An empty mapping,
            such as the state of an optimizer that has made no step, stands for all that is stored below its
            name. Other values say only which objects are wanted.
        options: as for `save`; those that affect saves only are ignored.

    Returns:
        With `into`, nested dictionaries of the same keys: its tensors and state providers, and the objects
        of the checkpoint. In the place of an empty mapping are nested dictionaries of what was stored there,
        in host memory; keys that are whole numbers are of type int.
        Without it, everything in the checkpoint by name: tensors whole and in host memory, streams as bytes.
        Objects that Megatron's training loop stored contain a few classes of Megatron-Core, which is imported
        for them; without megatron-core, load what you need with `into`.

    Raises:
        NotACheckpointError: no checkpoint was published there.
        OptionError: an option that does not exist, or what is no directory.
        MissingKeyError: the checkpoint has no value of a name.
        MismatchError: a tensor has another shape, or a dtype that stored values cannot become; without
            `into` and for an empty mapping, values of two kinds have one name.
        ProviderError: a state provider could not restore itself; its `__cause__` says why.
        UntrustedClassError: an object contains a class that is not trusted, or one of Megatron-Core's, which
            is not installed.
        CorruptDataError, StorageError, FormatError: damaged, missing or hostile files, by name.

        Tensors and objects that are missing, other shapes, and objects that are refused are found before any
        tensor of `into` is filled. After other errors, some may have been.
    """
    _check_path(directory)
    chosen = options_of_call(options, "load")
    with reported_load(directory, lambda: chosen) as tracker:
        checkpoint = Checkpoint.open(directory, chosen)
        tracker.follow(checkpoint)
        return _load_all(checkpoint, lambda name: True) if into is None else _load_into(checkpoint, into)


def _load_all(checkpoint: Checkpoint, is_wanted: Callable[[str], object]) -> dict[Any, Any]:
    """Returns all values with wanted names, by name."""
    kinds = (checkpoint.tensors, checkpoint.objects, checkpoint.streams)
    names, objects, streams = (list(filter(is_wanted, kind)) for kind in kinds)
    known: set[str] = set()
    for name in (*names, *objects, *streams):
        if name in known:
            raise MismatchError(
                f"{checkpoint.directory} has values of several kinds (tensor, object, stream) under the name "
                f"{name!r}: load with `into`, or read them one by one from megatron_datastates.open(...)"
            )
        known.add(name)
    checkpoint.index.preload(names)  # one by one, each would open the index
    tensors = checkpoint.read_tensors((name, None, None) for name in names)
    read = {name: b"".join(checkpoint.open_stream(name)) for name in streams}
    return {**dict(zip(names, tensors, strict=True)), **checkpoint.read_objects(objects), **read}


def _load_into(checkpoint: Checkpoint, into: State) -> dict[Any, Any]:
    wanted = named_values(into)
    shards = {name: shard for name, value in wanted.items() if (shard := _as_shard(name, value)) is not None}
    providers = {name: value for name, value in wanted.items() if isinstance(value, StateProvider)}
    kept = shards.keys() | providers.keys()
    others = {name: value for name, value in wanted.items() if name not in kept}
    empty = {name for name, value in others.items() if isinstance(value, Mapping) and not value}
    stored = set(checkpoint.index.objects)
    found: dict[str, Any] = _load_below(checkpoint, empty - stored)
    found |= checkpoint.read_objects(name for name in others if name not in found)
    # Ranks that have nothing of a state pass {} beside the one that has it all.
    found |= _load_below(checkpoint, {name for name in empty & stored if is_empty(found[name])})
    require_stored(checkpoint, providers)
    # Last, so that a load that is refused has changed nothing.
    fill(checkpoint, {name: (shard.place_of(name), shard.tensor) for name, shard in shards.items()})
    restore(checkpoint, providers)
    return map_leaves(into, lambda name: wanted[name] if name in kept else found[name])


def _load_below(checkpoint: Checkpoint, names: Set[str]) -> dict[str, Any]:
    """Returns the values below each of these names, if there are any, as nested dictionaries."""
    if not names:
        return {}
    below: dict[str, dict[str, Any]] = {}
    for stored, value in _load_all(checkpoint, lambda name: any(_above(name, names))).items():
        for name in _above(stored, names):
            below.setdefault(name, {})[stored[len(name) + 1 :]] = value
    return {name: nested(values) for name, values in below.items()}


def _above(name: str, names: Set[str]) -> Iterator[str]:
    """Yields those of `names` that `name` is below."""
    ends = (at for at, character in enumerate(name) if character == ".")
    return (name[:end] for end in ends if name[:end] in names)


def _as_shard(name: str, value: Any) -> Shard | None:
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise MismatchError(f"tensor {name!r}: the target is nested: pass one that has a shape")
        return Shard(value, tuple(value.shape), (0,) * value.dim())
    return value if isinstance(value, Shard) else None


@_uncompiled
def open(directory: StrPath, **options: Any) -> Checkpoint:
    """Opens a checkpoint to look inside: names, shapes and dtypes are there, data is read when asked for.

        checkpoint = ds.open("runs/gpt/iter_0001000")
        checkpoint.tensors["decoder.final_layernorm.weight"].global_shape
        checkpoint.read_tensor("decoder.final_layernorm.weight", offset=(0,), shape=(8,))

    Raises:
        NotACheckpointError: no checkpoint was published there.
        FormatError, UnsupportedFormatError, StorageError: its manifest or index cannot be used.
        OptionError: there is no such option, or not for what is read here.
    """
    _check_path(directory)
    # The program may change its own directory before it reads.
    return Checkpoint.open(absolute(path_of(directory)), options_of_call(options, "load"))
