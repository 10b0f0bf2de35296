"""The options of this package, with units, defaults and meanings.

An option is set by `--datastates-<name>` (Megatron's parser), else by the environment variable
`MEGATRON_DATASTATES_<NAME>`, else by its default here. No other module reads options from the environment.

Belongs here: the table of options, and where values come from. Does not belong here: how a value is written
(option_text.py); which options a call refuses (option_calls.py).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from megatron_datastates.errors import OptionError
from megatron_datastates.option_text import (
    ON_OR_OFF,
    one_of,
    parse_bytes,
    parse_file,
    parse_functions,
    parse_local_directory,
    parse_on_off,
    parse_seconds,
    whole_number,
)

ENVIRONMENT_PREFIX = "MEGATRON_DATASTATES_"
SWITCH = ENVIRONMENT_PREFIX + "ENABLE"  # no option: saves through torch_dist are ours (mcore/switch.py)
ACTIVATION = ENVIRONMENT_PREFIX + "ACTIVATE"  # nor this: what `import torch` does (mcore/hooks/activation.py)
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def is_switched_on() -> bool:
    """Returns whether MEGATRON_DATASTATES_ENABLE is on. Raises OptionError if it has another value."""
    return _is_on(SWITCH, default=False)


def is_activated() -> bool:
    """Returns whether MEGATRON_DATASTATES_ACTIVATE is not off. Raises OptionError if it has another value."""
    return _is_on(ACTIVATION, default=True)


def _is_on(variable: str, *, default: bool) -> bool:
    text = os.environ.get(variable, "")
    if text and text.lower() not in ON_OR_OFF:
        raise OptionError(f"environment variable {variable}={text!r}: expected 1 or 0, on or off")
    return ON_OR_OFF[text.lower()] if text else default


def _staging_memory(text: str) -> int:
    if text == "auto":
        return 0
    size = parse_bytes(text)
    if size < 8 * MIB:
        raise ValueError("expected 'auto' or at least 8MiB")
    return size


def _slot_size(text: str) -> int:
    if text == "auto":
        return 0
    size = parse_bytes(text)
    if size % MIB != 0 or not MIB <= size <= GIB:
        raise ValueError("expected 'auto' or a multiple of 1MiB, from 1MiB to 1GiB")
    return size


_threads, _count = whole_number(1, 64), whole_number(0, 9999)
_positive, _level = whole_number(1, 9999), whole_number(0, 19)


@dataclasses.dataclass(frozen=True)
class OptionSpec:
    """The parser, the placeholder and the help text of one option.

    Attributes:
        compared: returns of its value what has to be the same on all ranks; None: each may have its own.
    """

    parse: Callable[[str], Any]
    metavar: str
    help: str
    compared: Callable[[Any], object] | None = None


def _option(
    default: Any,
    parse: Callable[[str], Any],
    metavar: str,
    help: str,
    compared: Callable[[Any], object] | None = None,
    *,
    engine: bool = False,
) -> Any:
    spec = OptionSpec(parse, metavar, help, compared)
    return dataclasses.field(default=default, metadata={"spec": spec, "engine": engine})


def _hidden(default: Any, parse: Callable[[str], Any] = str, *, engine: bool = False) -> Any:
    return dataclasses.field(default=default, metadata={"parse": parse, "engine": engine})


def _is_given(text: str) -> str:
    return "given" if text else "not given"


@dataclasses.dataclass(frozen=True)
class Options:
    """All options; a field's default is the option's default. `engine`: staging engines read it."""

    staging_memory: int = _option(
        0,
        _staging_memory,
        "SIZE",
        "pinned host memory for staging, per rank. A shard of any size streams through it. A given size is "
        "allocated when the program starts; auto takes the size of the shard, up to 25%% of the free memory "
        "divided by the number of local ranks, while training begins (default auto)",
        engine=True,
    )
    slot_size: int = _option(
        0,
        _slot_size,
        "SIZE",
        "size of one slot of the staging memory, which is the size of one write (default auto: 2MiB, or 8MiB "
        "with a GPU unless less than 64MiB of staging memory is set)",
        engine=True,
    )
    direct_io: bool = _option(
        True,
        parse_on_off,
        "on|off",
        "bypass the page cache where the file system allows it, except for loads of objects, and of what "
        "several ranks of a node request (default on)",
        engine=True,
    )
    checksums: bool = _option(
        True,
        parse_on_off,
        "on|off",
        "store a CRC-32C for every MiB, computed while writing, and compare it at loads (default on)",
        engine=True,
    )
    lazy: bool = _option(
        True,
        parse_on_off,
        "on|off",
        "copy parameters and optimizer state during the next forward and backward pass, which do not change "
        "them; off copies everything before save_checkpoint returns (default on; off after enable() and "
        "with an untested release of Megatron-Core)",
    )
    paranoid: bool = _option(
        False,
        parse_on_off,
        "on|off",
        "for debugging: copy everything twice, the first time before save_checkpoint returns, and fail the "
        "save if the checksums differ, because something changed a tensor too early (default off)",
        engine=True,
    )
    prepared: bool = _option(
        True,
        parse_on_off,
        "on|off",
        "in Megatron's training loop, reuse what the last save has prepared (names, places and shapes of "
        "tensors) after checking that it still holds; off prepares every save anew (default on)",
    )
    copy_threads: int = _option(
        2, _threads, "N", "threads that copy host memory, with checksums (default 2)", engine=True
    )
    write_threads: int = _option(
        8,
        _threads,
        "N",
        "threads that write, with checksums of what a device has copied (default 8)",
        engine=True,
    )
    read_threads: int = _option(4, _threads, "N", "threads that read and check at a load (default 4)")
    copy_limit: int = _option(
        0,
        parse_bytes,
        "SIZE",
        "copy at most this many bytes a second, per rank (default 0: no limit)",
        engine=True,
    )
    write_limit: int = _option(
        0,
        parse_bytes,
        "SIZE",
        "write at most this many bytes a second, per rank (default 0: no limit)",
        engine=True,
    )
    compress: int = _option(
        0,
        _level,
        "LEVEL",
        "compress everything with zstd of this level, from 1 (fast) to 19 (small), without loss. It pays "
        "off only on slow disks, and the next optimizer step waits until all is compressed (default 0: off)",
    )
    fence_deadline: float = _option(
        240.0,
        parse_seconds,
        "SECONDS",
        "longest wait for copies, at the start of a save and again at the optimizer step; after that the "
        "step goes on and the save fails (by default that ends training: --datastates-on-failure). Both "
        "together must be less than --distributed-timeout-minutes, after which NCCL ends the other ranks "
        "(default 240)",
        engine=True,
    )
    link: bool = _option(
        True,
        parse_on_off,
        "on|off",
        "store tensors that are not trained in a data file of their own, and as long as they do not change, "
        "link that file into the next checkpoint instead of writing them again (default on)",
    )
    on_failure: Literal["raise", "warn"] = _option(
        "raise",
        one_of("raise", "warn"),
        "raise|warn",
        "what a failed save in Megatron's training loop, and a failed asynchronous one after enable(), does: "
        "raise an error on every rank, which ends training, or log a warning on rank 0 and train on; "
        "Megatron's training loop then raises an error at its end if the last save has failed "
        "(default raise)",
        compared=str,  # or some ranks end, and the others wait for them
    )
    while_saving: Literal["wait", "skip"] = _option(
        "wait",
        one_of("wait", "skip"),
        "wait|skip",
        "what happens to a save that starts while the previous one is unfinished: wait (for staging memory "
        "only), or skip it, and log how many were skipped (asynchronous saves in Megatron's training loop, "
        "but not the last one of a run; all others wait). The previous save continues in any case (default "
        "wait)",
        compared=str,  # or some ranks begin a save, and the others none
    )
    fallback: int = _option(
        0,
        _count,
        "N",
        "when a load in the training loop meets a damaged checkpoint, verify up to N older ones and name the "
        "newest undamaged one in the error. Those of other formats, such as torch_dist, are not verified: "
        "the error names one that is newer (default 0: do not look)",
    )
    on_damage: Literal["raise", "fallback"] = _option(
        "raise",
        one_of("raise", "fallback"),
        "raise|fallback",
        "what a load in the training loop that meets a damaged checkpoint does: raise an error, so that you "
        "decide how much training to repeat; or load the newest undamaged one that --datastates-fallback N "
        "finds, with a warning, and train on from there (default raise)",
    )
    trust_objects: bool = _option(
        False,
        parse_on_off,
        "on|off",
        "DANGEROUS: also store objects of classes that are on no list, and unpickle them without any check, "
        "so that whoever wrote a checkpoint runs code in the program that loads it; off refuses to save them "
        "(default off)",
    )
    providers: str = _option(
        "",
        parse_functions,
        "package.module:function",
        "further state for every checkpoint: functions without arguments, separated by commas, that return "
        "state providers; called at the first load, or when training begins (default: none)",
        compared=str,  # or a rank's part is missing from every checkpoint; and functions may communicate
    )
    near: str = _option(
        "",
        parse_local_directory,
        "DIR",
        "the near tier: a fast directory of each node, on NVMe or in memory, that checkpoints are written to "
        "first; from there they are copied to --save in the background. Variables such as $TMPDIR are those "
        "of each node (default: none)",
        compared=_is_given,  # all load together, and without rank 0's drain nothing is published in --save
    )
    near_keep: int = _option(
        1,
        _positive,
        "K",
        "how many checkpoints the near tier keeps, beside those that are still to be copied to --save "
        "(default 1)",
    )
    near_replicas: int = _option(
        0,
        _count,
        "K",
        "how many other nodes keep copies of a node's files in their near tiers, so that a lost node costs "
        "no checkpoint; a save is published once they have them (default 0)",
        compared=int,  # or nodes fetch from ranks that serve nothing
    )
    drain_every: int = _option(
        1,
        _positive,
        "N",
        "copy every Nth checkpoint from the near tier to --save, those that --save-retain-interval keeps, "
        "and the last one of a job; the others stay near (default 1)",
        compared=int,  # or parts of different checkpoints are copied, and none is complete
    )
    drain_limit: int = _option(
        0,
        parse_bytes,
        "SIZE",
        "while the job trains, copy at most this many bytes a second from the near tier to --save, per node "
        "(default 0: no limit)",
    )
    report_file: str = _option(
        "",
        parse_file,
        "PATH",
        "rank 0 appends one line of JSON to this file for each save, each load and what near tiers do "
        "(default: no file)",
    )
    # For tests and benchmarks; --help does not list them.
    faults: str = _hidden("", engine=True)
    driver: str = _hidden("libcuda.so.1", engine=True)
    sysfs: str = _hidden("/sys", engine=True)
    # Write nothing, to measure copies without a disk; no save is ever published then.
    discard: bool = _hidden(False, parse_on_off, engine=True)
    tripwire: bool = _hidden(True, parse_on_off, engine=True)
    # Bytes of device copies that wait in the driver, unless the trainer waits for them. The more there are,
    # the longer a small copy of the trainer's waits; the fewer, the more calls of the driver, which delay its
    # launches (benchmarks/results/gpu-h100-small-copies.json).
    most_in_flight: int = _hidden(8 * MIB, parse_bytes, engine=True)
    # Where the tripwire samples the first save, the next has the next number; 0: somewhere else in each run.
    sample_seed: int = _hidden(0, int, engine=True)
    # Bytes of stable tensors from which on a rank stores them apart. Below, one more file for each rank and
    # checkpoint, with its creation and its sync, costs more than writing them.
    link_from: int = _hidden(16 * MIB, parse_bytes)
    # Seconds until lazy copies begin in a loop that neither polls nor fences.
    lazy_delay: float = _hidden(0.1, parse_seconds)

    def __post_init__(self) -> None:
        if self.staging_memory and self.staging_memory < 2 * self.slot_size:
            raise OptionError(
                f"staging memory of {self.staging_memory} bytes is less than two slots of {self.slot_size}: "
                "raise --datastates-staging-memory or lower --datastates-slot-size"
            )

    @classmethod
    def specs(cls) -> dict[str, OptionSpec]:
        """Returns the options that users see: field name -> specification."""
        return {f.name: f.metadata["spec"] for f in dataclasses.fields(cls) if "spec" in f.metadata}

    @functools.lru_cache(maxsize=64)  # noqa: B019 (they are few, and small)
    def of_engine(self) -> Options:
        """Returns these with defaults for those that no staging engine reads: if equal, engines are alike."""
        fields = dataclasses.fields(self)
        others: dict[str, Any] = {f.name: f.default for f in fields if not f.metadata["engine"]}
        return dataclasses.replace(self, **others)

    def of_all_ranks(self) -> dict[str, str]:
        """Returns what has to be the same on all ranks, by option, as text."""
        specs = self.specs().items()
        return {name: str(spec.compared(getattr(self, name))) for name, spec in specs if spec.compared}

    @classmethod
    def from_environment(
        cls,
        overrides: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] = os.environ,
        **defaults: Any,
    ) -> Options:
        """Reads the options: from `overrides`, else the environment, else `defaults`, else the defaults here.

        Args:
            overrides: values, or text as on a command line ("off", "64MiB").
            environment: variables `MEGATRON_DATASTATES_<NAME>`, with text.
            defaults: values that replace the defaults of this class.

        Raises:
            OptionError: a value is invalid, or there is no such variable or option.
        """
        own = [field.name.upper() for field in dataclasses.fields(cls)]
        others = [name.removeprefix(ENVIRONMENT_PREFIX) for name in (SWITCH, ACTIVATION)]
        _require_known(environment, [*others, *own])
        values: dict[str, Any] = dict(defaults)
        for field in dataclasses.fields(cls):
            text = environment.get(ENVIRONMENT_PREFIX + field.name.upper())
            if text is not None:
                values[field.name] = _read(field, text)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in (overrides or {}).items():
            if name not in fields:
                advice = advice_on(name, list(cls.specs()))
                raise OptionError(f"no such option: {name}; {advice}")
            values[name] = _checked(fields[name], value)
        return cls(**values)


def _require_known(environment: Mapping[str, str], known: Sequence[str]) -> None:
    """Raises OptionError for a variable with our prefix that sets nothing, such as a misspelt one."""
    for name in environment:
        own = name.removeprefix(ENVIRONMENT_PREFIX)
        if own != name and own not in known:
            advice = advice_on(own, known, ENVIRONMENT_PREFIX)
            raise OptionError(f"environment variable {name}: no such option; {advice}")


def advice_on(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Returns, for an error, which of the known names may be meant, or how to list them."""
    similar = difflib.get_close_matches(name, known, 1)
    return f"did you mean {prefix}{similar[0]}?" if similar else "`datastates options` lists all"


def _read(field: dataclasses.Field[Any], text: str) -> Any:
    name = ENVIRONMENT_PREFIX + field.name.upper()
    return _parsed(field, text, f"environment variable {name}={text!r}")


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """Returns the value of an option that a program has given. Raises OptionError if it makes no sense."""
    kind, what = type(field.default), f"option {field.name}={value!r}"
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        number = kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool)
        if not (isinstance(value, kind) or number) or isinstance(value, bool) != (kind is bool):
            raise OptionError(f"{what}: expected {_KINDS[kind]}, found {type(value).__name__}")
        if value == field.default:  # which may have no text
            return field.default
        if kind is bool:
            return value
    return _parsed(field, str(value), what)


_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def _parsed(field: dataclasses.Field[Any], text: str, what: str) -> Any:
    spec = field.metadata.get("spec")
    parse = spec.parse if spec is not None else field.metadata["parse"]
    try:
        return parse(text)
    except ValueError as error:
        raise OptionError(f"{what}: {error}") from None
