"""What the reports of a run say about its settings and its machines: sentences with numbers.

Each rule looks at all saves and returns at most one piece of advice. A rule that concerns speed looks at
medians over published saves without the first one of each run, which allocates memory and plans for the
others.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

from megatron_datastates.config import GIB, MIB
from megatron_datastates.errors import CHANGED_TOO_EARLY
from megatron_datastates.reports.reading import Save, Skip, Spread
from megatron_datastates.reports.timing import held_shares, intervals, iteration_seconds, median, usual
from megatron_datastates.units import size_text

_LONG_WAIT_MS = 10.0  # for the trainer, in one save
_LONG_SERIALIZING_MS = 100.0
_FAR_SLOWER = 1.5  # times the median rank
_FAR_SLOWER_MS = 100.0
_BUSY = 0.8  # of the interval between saves
_MANY_EAGER = 0.25  # of the bytes of a save
_MANY_EAGER_BYTES = 64 * MIB


@dataclasses.dataclass(frozen=True)
class Advice:
    """One finding. `level` is "failure", "slow" or "note"."""

    level: str
    title: str
    text: str


def advise(saves: Sequence[Save], skips: Sequence[Skip] = ()) -> list[Advice]:
    """Returns what is worth changing, the worst first, and then what the saves cost altogether."""
    found = [rule(saves) for rule in _RULES]
    found.insert(1, _skips(saves, skips))
    return sorted(filter(None, found), key=lambda advice: ("failure", "slow", "note").index(advice.level))


def milliseconds(value: float) -> str:
    """Formats milliseconds for people, such as `12 ms` or `3.4 s`."""
    if value >= 9_950:
        return f"{value / 1000:,.0f} s"
    if value >= 995:
        return f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if value >= 9.95 else f"{value:.1f} ms"


def _failures(saves: Sequence[Save]) -> Advice | None:
    failed = [save for save in saves if save.failed]
    if not failed:
        return None
    last = failed[-1]
    reason = (last.error or "without a reason").strip().split("\n")[0].removesuffix(".")
    torn = sum(CHANGED_TOO_EARLY in (save.error or "") for save in failed)
    hint = 'docs/operations.md, "A save failed", has the causes.'
    if torn:
        hint = (
            f"In {torn} of them a tensor changed before it was copied: call megatron_datastates.fence() "
            "before the code that changes it, or set --datastates-lazy off; --datastates-paranoid on finds "
            "all such places."
        )
    return Advice(
        "failure",
        f"{len(failed)} of {len(saves)} saves failed",
        f"The last one, at {last.title}: {reason}. {hint}",
    )


def _skips(saves: Sequence[Save], skips: Sequence[Skip]) -> Advice | None:
    if not skips:
        return None
    took = median(save.published_ms for save in saves if save.published_ms is not None)
    return Advice(
        "slow",
        f"{len(skips)} of {len(saves) + len(skips)} saves were skipped",
        f"The last one, at iteration {skips[-1].iteration}: an earlier save was not finished "
        "(--datastates-while-saving skip). Saves are published "
        f"{milliseconds(took)} after they begin (median). Save less often, or use faster storage: a crash "
        "loses more iterations than --save-interval says.",
    )


def _missing_copies(saves: Sequence[Save]) -> Advice | None:
    found = [(save, save.copies.error) for save in saves if save.copies is not None]
    missing = [(save, error) for save, error in found if error]
    if not missing:
        return None
    last, error = missing[-1]
    return Advice(
        "note",
        f"{len(missing)} of {len(found)} saves have no copies on other nodes, or not all",
        f"The last one, at {last.title}: {error}. A node that is lost takes along what "
        "it has not copied to --save.",
    )


def _disk_slower_than_interval(saves: Sequence[Save]) -> Advice | None:
    known = [
        (save.disk_ms / 1000, seconds)
        for save, seconds in zip(saves, intervals(saves), strict=True)
        if seconds is not None and not save.failed and save.mode != "sync"  # whose interval contains it
    ]
    needed, between = median(pair[0] for pair in known), median(pair[1] for pair in known)
    # A save waits for an optimizer's step and for polls, too: the next one may begin beside it, whatever the
    # disk does.
    if not known or needed < _BUSY * between:
        return None
    queued = sum(save.saves_before > 0 for save in saves)
    rate = median(save.write_mb_per_s for save in usual(saves))
    text = (
        f"{queued} of {len(saves)} saves began while an earlier one was unfinished. Writing and syncing one "
        f"takes {milliseconds(needed * 1000)} (median, slowest rank, {rate:,.0f} MB/s), and the next one "
        f"begins after {milliseconds(between * 1000)}. "
    )
    step = iteration_seconds(saves)
    if step:
        text += f"Save every {math.ceil(needed / _BUSY / step):,} iterations or more, or use faster storage."
    else:
        text += "Save less often, or use faster storage."
    return Advice("slow", "The disk needs most of the interval between saves", text)


def _slow_drain(saves: Sequence[Save]) -> Advice | None:
    drained = [save for save in saves if save.far_ms is not None]  # each --datastates-drain-every-th
    known = [
        ((save.far_ms - save.published_ms) / 1000, seconds)
        for save, seconds in zip(drained, intervals(drained), strict=True)
        if save.far_ms is not None and save.published_ms is not None and seconds is not None
    ]
    if not known:
        return None
    needed, between = median(pair[0] for pair in known), median(pair[1] for pair in known)
    if needed < between:
        return None
    every = math.ceil(needed / (median(filter(None, intervals(saves))) or between)) + 1
    return Advice(
        "slow",
        "Copying from the near tiers to --save takes longer than the interval between checkpoints",
        f"A checkpoint is there {milliseconds(needed * 1000)} after it was published near (median), and the "
        f"next one to be copied there is published after {milliseconds(between * 1000)}: the near tiers "
        "fill up. Raise --datastates-drain-limit if it is set, or copy fewer there: "
        f"--datastates-drain-every {every}.",
    )


def _slow_rank(saves: Sequence[Save]) -> Advice | None:
    for name, verb in (("writing", "write"), ("staging", "copy"), ("durable", "sync"), ("held", "resume")):
        spreads = [save.spreads[name] for save in usual(saves) if name in save.spreads and save.ranks > 1]
        far = [spread for spread in spreads if _is_far(spread)]
        if not far or len(far) < len(spreads) / 2:
            continue
        rank, times = collections.Counter(spread.slowest_rank for spread in far).most_common(1)[0]
        worst, others = (
            median(spread.most for spread in far if spread.slowest_rank == rank),
            median(spread.median for spread in far if spread.slowest_rank == rank),
        )
        where = "Compare its node's disk and network with the others'."
        if name == "held":
            where = "Look for what else delays that rank; it is rarely the save."
        return Advice(
            "slow",
            f"Rank {rank} is far slower than the others to {verb}",
            f"It was the slowest in {times} of {len(spreads)} saves, and needed {milliseconds(worst)}; "
            f"the median rank needed {milliseconds(others)}. {where}",
        )
    return None


def _is_far(spread: Spread) -> bool:
    return spread.most > _FAR_SLOWER * spread.median and spread.most - spread.median > _FAR_SLOWER_MS


def _pool_too_small(saves: Sequence[Save]) -> Advice | None:
    regular = usual(saves)
    waited = median(save.slot_wait_ms - save.memory_wait_ms for save in regular)
    shard = median(save.eager_bytes + save.lazy_bytes for save in regular)
    pool = median(save.staging_bytes for save in regular)
    if waited < _LONG_WAIT_MS or not 0 < pool < shard:
        return None
    fence = median(save.fence_ms + save.stream_wait_ms for save in regular)
    harm = f"the optimizer waited {milliseconds(fence)} for copies"
    if fence < _LONG_WAIT_MS:
        harm = "the optimizer hardly waited for it, so this is harmless so far"
    return Advice(
        "slow" if fence >= _LONG_WAIT_MS else "note",
        "The staging memory is smaller than the shard",
        f"Copies waited {milliseconds(waited)} in a save for slots (summed over copying threads); "
        f"{harm}. The pool has {size_text(pool)} and the shard {size_text(shard)}: "
        f"--datastates-staging-memory {math.ceil(shard / GIB)}GiB holds all of it.",
    )


def _memory_waits(saves: Sequence[Save]) -> Advice | None:
    waits = [save for save in saves if save.memory_wait_ms > _LONG_WAIT_MS]
    if not waits:
        return None
    worst = max(waits, key=lambda save: save.memory_wait_ms)
    shard = worst.eager_bytes + worst.lazy_bytes
    return Advice(
        "note",
        "Copies waited for staging memory to be allocated",
        f"{milliseconds(worst.memory_wait_ms)} at {worst.title}. With a fixed size, such as "
        f"--datastates-staging-memory {max(1, math.ceil(shard / GIB))}GiB, it is allocated when the program "
        "starts.",
    )


def _fence_waits(saves: Sequence[Save]) -> Advice | None:
    regular = usual(saves)
    fence = median(save.fence_ms for save in regular)
    stream = median(save.stream_wait_ms for save in regular)
    if max(fence, stream) < _LONG_WAIT_MS:
        return None
    staged = median(save.slowest_ms("staging") for save in regular)
    copied = median(save.eager_bytes + save.lazy_bytes for save in regular)
    what = "--datastates-copy-limit if it is set, or, for tensors in host memory, --datastates-copy-threads"
    if median(save.slot_wait_ms for save in regular) >= _LONG_WAIT_MS:
        what = "--datastates-staging-memory, or --datastates-copy-limit if it is set"
    return Advice(
        "slow",
        "The optimizer waits for copies",
        f"{milliseconds(fence)} of the host's time and {milliseconds(stream)} of the device's stream in a "
        f"save. {size_text(copied)} a rank are copied after {milliseconds(staged)}, which is longer than the "
        f"forward and backward pass. Raise {what}.",
    )


def _eager(saves: Sequence[Save]) -> Advice | None:
    regular = usual(saves)
    eager, lazy = median(save.eager_bytes for save in regular), median(save.lazy_bytes for save in regular)
    if eager < _MANY_EAGER_BYTES or eager < _MANY_EAGER * (eager + lazy):
        return None
    last = regular[-1]
    shares = {
        name or "the model and the optimizer": one.get("eager_bytes", 0)
        for name, one in last.providers.items()
    }
    whose = max(shares, key=lambda name: shares[name], default="the model and the optimizer")
    if lazy:
        why = (
            "Only parameters, and memory of optimizers that have stepped, can be copied later; buffers, "
            "dequantized weights and fully reshardable optimizer state cannot."
        )
    elif _are_synchronous(regular):
        why = "The saves are synchronous: add --async-save."
    else:
        why = (
            "Nothing is copied later: --datastates-lazy is off (it is by default with an untested release of "
            "Megatron-Core), or the saves do not come from Megatron's own training loop."
        )
    return Advice(
        "slow",
        "Many bytes are copied before the save returns",
        f"{size_text(eager)} of {size_text(eager + lazy)} on this rank, most of it of {whose}. {why}",
    )


def _are_synchronous(saves: Sequence[Save]) -> bool:
    """Returns whether all are: a program that saves asynchronously may end with one that is not."""
    return all(save.mode == "sync" for save in saves)


def _serializing(saves: Sequence[Save]) -> Advice | None:
    # Not serializing_ms: that has the wait until the thread may begin, 100 ms without a poll or a fence.
    regular = usual(saves)
    serialized, durable = median(map(_tail_ms, regular)), median(save.durable_ms for save in regular)
    staged = median(save.staging_ms for save in regular)
    if serialized < _LONG_SERIALIZING_MS or serialized < 0.5 * durable or serialized < 2 * staged:
        return None
    tails = max(regular, key=_tail_ms).providers
    name = max(tails, key=lambda one: tails[one].get("tail_ms", 0))
    tail = tails[name]
    encoding = "; --datastates-compress 0 encodes nothing" if tail.get("encoded_tensors") else ""
    return Advice(
        "slow",
        "Serialized objects take most of a save",
        f"Serializing them takes {milliseconds(serialized)} of {milliseconds(durable)} until the file is "
        f"durable; tensors are copied after {milliseconds(staged)}. Most are of "
        f"{name or 'the model and the optimizer'}: {tail.get('objects', 0):,.0f} objects, "
        f"{tail.get('encoded_tensors', 0):,.0f} encoded tensors, {tail.get('streams', 0):,.0f} streams, "
        f"{size_text(tail.get('tail_bytes', 0))}. Store large data as tensors{encoding}.",
    )


def _tail_ms(save: Save) -> float:
    """Returns the time that serializing, encoding and appending took, for all providers together."""
    return sum(one.get("tail_ms", 0.0) for one in save.providers.values())


def _page_lock(saves: Sequence[Save]) -> Advice | None:
    last = saves[-1]
    on_device = sum(one.get("device_bytes", 0) for one in last.providers.values())
    short = on_device and last.page_locked_bytes < last.staging_bytes
    if not short and not last.staging_trouble:
        return None
    trouble = last.staging_trouble or "part of it is not page-locked, so that copies from the device are slow"
    return Advice(
        "slow",
        "The staging memory is not as it should be",
        f"{size_text(last.page_locked_bytes)} of {size_text(last.staging_bytes)} are page-locked: {trouble}. "
        'docs/operations.md, "Staging memory", has the causes.',
    )


def _not_prepared(saves: Sequence[Save]) -> Advice | None:
    regular = [save for save in usual(saves) if save.prepared is not None]
    anew = [save for save in regular if not save.prepared]
    reused = [save.held_ms for save in regular if save.prepared]
    reasons = [save.not_prepared_because for save in anew if save.not_prepared_because]
    if not anew or not (reused or reasons):  # off
        return None
    cost = f"They held the trainer for {milliseconds(median(save.held_ms for save in anew))}"
    cost += f", the others for {milliseconds(median(reused))}. " if reused else ". "
    why = f"The last one was at {anew[-1].title}"
    why += f"; the last known reason: {reasons[-1]}." if reasons else ", for a reason that no report has."
    title = f"{len(anew)} of {len(regular)} saves could not reuse what the last one had prepared"
    return Advice("note", title, cost + why)


def _cost(saves: Sequence[Save]) -> Advice | None:
    saves = [save for save in saves if save.mode != "dcp"]  # of those, what held the trainer is not measured
    regular = usual(saves)
    if not regular:
        return None
    held = median(save.held_ms for save in regular)
    shares = [held_shares(save) for save in regular]
    parts = {part: median(share.get(part, 0.0) for share in shares) for share in shares for part in share}
    name = max(parts, key=lambda part: parts[part])
    meaning = {
        "save_checkpoint": "Megatron's own work in save_checkpoint",
        "save": "waiting in ds.save until the checkpoint is published",
        "wait": "waiting until the checkpoint is published",
        "until_poll": "waiting for the next poll",
        "polls": "polls, in which the ranks agree on how far a save is",
        "fence": "the fence, where the optimizer's step waits for copies",
        "finalize": "what Megatron does once a save is published",
    }
    counted = {save.save_id for save in regular}
    first = ", without the first ones of a run, which take longer"
    left_out = first if any(not save.failed and save.save_id not in counted for save in saves) else ""
    several = f"median of {len(regular)} saves" if len(regular) > 1 else "one save"
    text = f"{milliseconds(held)} ({several}{left_out}); the largest part is "
    text += f"{meaning.get(name, name)}: {milliseconds(parts[name])}."
    spans = zip(saves, intervals(saves), strict=True)
    known = [(save, between) for save, between in spans if save.save_id in counted]
    followed = [(save.held_ms, 1000 * between) for save, between in known if between]
    if followed:
        share = sum(held for held, _ in followed) / sum(between for _, between in followed)
        text += f" From one save to the next, that is {share:.1%} of the time."
    if _are_synchronous(regular):
        text += " The saves are synchronous: with --async-save (ds.async_save), training goes on meanwhile."
    return Advice("note", "What a save costs the trainer", text)


_RULES: tuple[Callable[[Sequence[Save]], Advice | None], ...] = (
    _failures,
    _disk_slower_than_interval,
    _slow_drain,
    _missing_copies,
    _fence_waits,
    _slow_rank,
    _pool_too_small,
    _eager,
    _serializing,
    _page_lock,
    _memory_waits,
    _not_prepared,
    _cost,
)
