"""datastates prune --drop-optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_datastates.cli.shared import advancing, counted, note, print_json, say
from megatron_datastates.errors import DataStatesError, describe_error
from megatron_datastates.format.directory import JOURNAL_NAME, is_through_dcp, iteration_in_name
from megatron_datastates.pipeline.runs.runs import Iteration, stored_bytes
from megatron_datastates.units import size_text

if TYPE_CHECKING:
    from megatron_datastates.pipeline.upkeep.retention import OtherFormats, RetentionRules

_NOT_FOR_FSDP = (
    "Megatron-FSDP with --bf16 or --fp16 does not start from a checkpoint without its optimizer: what is "
    "left is for `datastates export`, ds.load and DCP"
)
_LISTS = ("would_drop", "dropped", "kept", "failed")  # without --yes, the first one; with it, the second


def finish_drops(root: Path) -> None:
    """Removes what killed calls have left beside complete checkpoints. Raises what finish_drop does."""
    for journal in sorted(root.glob(f"*/{JOURNAL_NAME}")):
        if iteration_in_name(journal.parent.name) is not None and not journal.parent.is_symlink():
            from megatron_datastates.convert.weights_only import finish_drop

            finish_drop(journal.parent)


def drop_all(root: Path, rules: RetentionRules, others: OtherFormats, yes: bool, as_json: bool) -> int:
    """Drops the optimizer's state of all checkpoints that the rules do not keep; returns the exit code.

    If one cannot be rewritten, the others still are.

    Raises:
        DataStatesError: as plan_prune.
    """
    from megatron_datastates.pipeline.upkeep.retention import plan_prune

    plan = last = plan_prune(root, rules, others)
    call = _Call(yes, quiet=as_json)
    for one, why in plan.kept:
        call.keep(one, why)
    if yes and plan.removed:
        rules = rules.by_clock_of(plan.removed[0].path.parent)
    for one in plan.removed:
        try:
            if not one.complete:
                call.keep(one, "incomplete: without --drop-optimizer, prune removes it")
                continue
            if yes:
                last = plan_prune(root, rules, others, (one, last))
            if yes and one not in last.removed:
                call.keep(one, "a save into it may be under way")
            else:
                call.drop(one)
        except (DataStatesError, OSError) as error:
            call.fail(one, error)
    if as_json:
        print_json(call.found)
    else:
        call.print_summary()
    return 1 if call.found["failed"] else 0


class _Call:
    """What one call does, line by line."""

    def __init__(self, yes: bool, quiet: bool) -> None:
        self._yes, self._say = yes, (lambda text: None) if quiet else say
        self.found: dict[str, list[dict[str, Any]]] = {name: [] for name in _LISTS}

    def keep(self, one: Iteration, why: str) -> None:
        self._say(f"keep  {one.path}  ({why})")
        self.found["kept"].append({"iteration": one.number, "path": str(one.path), "why": why})

    def drop(self, one: Iteration) -> None:
        """Drops the optimizer's state of one checkpoint, or says what that would free. Raises what fails."""
        from megatron_datastates.convert.weights_only import drop_optimizer, plan_drop

        before = stored_bytes(one.path)
        plan = plan_drop(one.path)
        if plan is None:
            self.keep(one, "it has no optimizer state")
            return
        freed = plan.dropped_bytes
        if self._yes:
            with advancing("rewriting", plan.written_bytes) as progress:
                freed = drop_optimizer(plan, progress=progress)
        verb = "dropped the optimizer of" if self._yes else "would drop the optimizer of"
        self._say(f"{verb}  {one.path}  {size_text(freed)} of {size_text(before)}")
        if is_through_dcp(plan.source.objects):
            note(f"{one.path}: {_NOT_FOR_FSDP}")
        if plan.source.left_out:
            note(f"{one.path}: {plan.source.left_out}")
        self.found["dropped" if self._yes else "would_drop"].append(
            {"iteration": one.number, "path": str(one.path), "bytes": before, "freed": freed}
        )

    def fail(self, one: Iteration, error: DataStatesError | OSError) -> None:
        """Notes that one could not be rewritten."""
        from megatron_datastates.convert.weights_only import UnfinishedError

        why = describe_error(error)
        note(f"{one.path}: {'' if isinstance(error, UnfinishedError) else 'not changed: '}{why}")
        self.found["failed"].append({"iteration": one.number, "path": str(one.path), "why": why})

    def print_summary(self) -> None:
        dropped, failed = self.found["would_drop"] + self.found["dropped"], self.found["failed"]
        freed = size_text(sum(one["freed"] for one in dropped))
        of = f"{len(dropped)} of {counted(sum(map(len, self.found.values())), 'checkpoint')}"
        lacking = f", {len(failed)} failed" if failed else ""
        say(f"{'freed' if self._yes else 'would free'} {freed} in {of}{lacking}")
        if dropped and not self._yes:
            say("Nothing was changed. Add --yes to drop.")
