"""What each state provider adds to a save: numbers and bytes, for reports.

What belongs here: sums of what is known anyway, made only when a report is wanted. What does not: times of
staging and writing, because tensors of several providers share slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_datastates.format.tail import Kind
from megatron_datastates.pipeline.saving.plans import StatePlan
from megatron_datastates.pipeline.saving.tail import TailCosts
from megatron_datastates.providers.collect import ProviderEntries
from megatron_datastates.units import milliseconds


def provider_costs(
    plan: StatePlan | None, providers: Sequence[ProviderEntries], tails: Mapping[str, TailCosts]
) -> dict[str, dict[str, Any]]:
    """Returns what each provider adds to a rank's save, by name, with the fields of docs/reports.md.

    Args:
        plan: None if the save failed before it had one; then nothing is returned.
        tails: by the provider's name; none for a provider that has written nothing to the tail.
    """
    if plan is None:
        return {}
    return {
        provider.name: _costs(plan, provider, tails.get(provider.name, TailCosts())) for provider in providers
    }


def _costs(plan: StatePlan, provider: ProviderEntries, tail: TailCosts) -> dict[str, Any]:
    mine = slice(provider.first_tensor, provider.end_tensor)
    sizes, eager, on_device = plan.sizes[mine], plan.eager[mine], plan.on_device[mine]
    return {
        "tensors": len(sizes),
        "eager_bytes": int(sizes[eager].sum()),
        "lazy_bytes": int(sizes[~eager].sum()),
        "host_bytes": int(sizes[~on_device].sum()),
        "device_bytes": int(sizes[on_device].sum()),
        "encoded_tensors": tail.entries.get(Kind.FRAGMENT, 0),
        "objects": tail.entries.get(Kind.OBJECT, 0),
        "streams": tail.entries.get(Kind.STREAM, 0),
        "tail_bytes": tail.logical_bytes,
        "tail_stored_bytes": tail.bytes,
        "tail_ms": milliseconds(tail.seconds),
    }
