"""One screen about a checkpoint, for `datastates show`."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_datastates.cli.shared import counted, parallelism_text
from megatron_datastates.convert.look import look_at
from megatron_datastates.convert.parts import group_of, is_of_generators, is_weight
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.convert.stored_arguments import training_arguments
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.values import element_bytes, is_of_optimizer
from megatron_datastates.units import size_text

_NAMED_JOBS = 5
_MODEL = (
    ("num_layers", "{} layers"),
    ("hidden_size", "hidden {}"),
    ("num_attention_heads", "{} heads"),
    ("seq_length", "sequence {}"),
    ("padded_vocab_size", "vocabulary {}"),
    ("num_experts", "{} experts"),
)
_TRAINING = (
    ("train_iters", "{} iterations"),
    ("consumed_train_samples", "{} samples so far"),
    ("global_batch_size", "global batch {}"),
    ("lr", "lr {}"),
    ("optimizer", "{}"),
    ("params_dtype", "weights in {}"),
)
_NO_STATES = "none: it was not saved, or removed by prune --drop-optimizer"


def summary(path: Path, source: Source) -> list[tuple[str, str]]:
    """Returns rows of a name and a text: when, by how many ranks, which model, how much of what."""
    look, arguments = look_at(path, records=source.dcp_records), _arguments(source)
    whole = "" if look.state == "complete" else f", {look.state}: {look.problem}"
    weights = [key for key in source.tensors if is_weight(key)]
    states = [key for key in source.tensors if is_of_optimizer(key)]
    number = "" if look.iteration is None else f", iteration {look.iteration}"
    rows = [
        ("checkpoint", f"{path}, {source.format}{number}{whole}"),
        ("saved", f"{look.created.replace('T', ' ')[:16]} UTC{_ranks(look.ranks, look.parallel)}"),
        ("job", _resumed(look.resumed)),
        ("model", _described(_MODEL, arguments)),
        ("training", _described(_TRAINING, arguments)),
        ("weights", _weights(source, weights)),
        ("optimizer", _states(source, states) or (_NO_STATES if arguments and weights else "")),
        ("others", _others(source)),
        ("on disk", size_text(look.bytes)),
    ]
    return [(name, text) for name, text in rows if text]


def _arguments(source: Source) -> Mapping[str, Any]:
    """Returns the training arguments; none where there are none, or they cannot be read: `args` says why."""
    with contextlib.suppress(DataStatesError, OSError):
        return training_arguments(source)
    return {}


def _ranks(ranks: int | None, parallel: Mapping[str, int]) -> str:
    if ranks is None:
        return ""
    sizes = parallelism_text(parallel)
    return f" by {counted(ranks, 'rank')}" + (f" ({sizes})" if sizes else "")


def _resumed(iterations: Sequence[int]) -> str:
    """Returns which checkpoint the saving job resumed from, and the last few of the jobs before it."""
    if not iterations:
        return ""
    before = [f"{iteration:,}" for iteration in reversed(iterations[-_NAMED_JOBS:-1])]
    left = len(iterations) - 1 - len(before)
    others = f"; jobs before it from {', '.join(before)}" if before else ""
    return f"resumed from iteration {iterations[-1]:,}{others}" + (f" and {left:,} more" if left else "")


def _described(texts: Collection[tuple[str, str]], arguments: Mapping[str, Any]) -> str:
    """Returns what the arguments say; those that are missing or None are left out."""
    values = {
        name: str(value).removeprefix("torch.") for name, value in arguments.items() if value is not None
    }
    return ", ".join(text.format(values[name]) for name, text in texts if name in values)


def _weights(source: Source, keys: Collection[str]) -> str:
    counts: Counter[str] = Counter()
    for key in keys:
        counts[source.tensors[key].dtype] += math.prod(source.tensors[key].global_shape)
    parts = [f"{counted(count, _noun(dtype))} in {dtype}" for dtype, count in counts.most_common()]
    return f"{' and '.join(parts)}, {_sized(source, keys)}" if keys else ""


def _noun(dtype: str) -> str:
    """Returns what elements of the model are: integers may be buffers, or counts that a program keeps."""
    return "parameter" if dtype.startswith(("float", "bfloat", "complex")) else "element"


def _states(source: Source, keys: Collection[str]) -> str:
    kinds = sorted({group_of(key).removeprefix("optimizer ") for key in keys})
    return f"{', '.join(kinds)}, {_sized(source, keys)}" if keys else ""


def _sized(source: Source, keys: Collection[str]) -> str:
    total = sum(
        math.prod(source.tensors[key].global_shape) * element_bytes(source.tensors[key].dtype) for key in keys
    )
    return f"{size_text(total)} in {counted(len(keys), 'tensor')}"


def _others(source: Source) -> str:
    generators = sum(map(is_of_generators, source.tensors))
    found = [f"{counted(generators, 'tensor')} of random generators"] if generators else []
    found += [counted(len(source.objects), "object")] if source.objects else []
    return ", ".join(found + ([counted(len(source.streams), "stream")] if source.streams else []))
