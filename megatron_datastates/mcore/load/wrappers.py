"""Megatron's functions that load, wrapped so that ranks agree (agreement.py) and states are restated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megatron_datastates.errors import some_of
from megatron_datastates.mcore.hooks.calls import parameters_of
from megatron_datastates.mcore.load import state
from megatron_datastates.mcore.load.agreement import Agreement
from megatron_datastates.mcore.load.opening import is_open, is_ours, open_checkpoint
from megatron_datastates.pipeline.publishing.collectives import Collectives, ranks_of
from megatron_datastates.pipeline.runs.runs import may_be_ours

logger = logging.getLogger(__name__)


def wrap_load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `dist_checkpointing.load`."""
    return _LoadCall(original, args, kwargs).run()


class _LoadCall:
    """One call of `dist_checkpointing.load`."""

    def __init__(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._original, self._args, self._kwargs = original, args, kwargs
        self._parameters = parameters_of(original)
        self._arguments = self._parameters.defaults | self._parameters.of_call(args, kwargs)
        self._directory = self._arguments["checkpoint_dir"]

    def run(self) -> Any:
        if not (is_open(self._directory) or may_be_ours(self._directory)):
            return self._load_elsewhere()
        from megatron_datastates.pipeline.load_report import reported_load

        # Reported once all ranks have agreed on whether it failed.
        with (
            reported_load(self._directory, state.current().options) as tracker,
            state.opened(tracker=tracker),
        ):
            return self._load_together()

    def _load_elsewhere(self) -> Any:
        if state.current().in_training_loop:  # it asks for what is stored: there is nothing to restate
            return self._start()
        from megatron_datastates.mcore.load import optimizer_elsewhere

        with optimizer_elsewhere.explaining(self._arguments):
            return self._start(optimizer_elsewhere.restated_where_needed(self._arguments))

    def _start(self, restated: state.Restated | None = None) -> Any:
        """Calls Megatron's function; with the restated request, if there is one."""
        if restated is not None:
            self._replace("sharded_state_dict", restated.request)
        with state.opened(restated=restated):
            return self._original(*self._args, **self._kwargs)

    def _replace(self, name: str, value: Any) -> None:
        self._args, self._kwargs = self._parameters.replaced(self._args, self._kwargs, name, value)

    def _load_together(self) -> Any:
        agreement = _agreement_of(self._arguments)
        if agreement is None:
            return self._load_restated(None)
        with agreement.sharing_failures():
            problem: Exception | None = None
            if self._arguments.get("verify_integrity"):  # since 0.19
                self._replace("verify_integrity", False)
                try:
                    agreement.verify_files()
                except Exception as error:
                    problem = error
            return self._load_restated(agreement, problem)

    def _load_restated(self, agreement: Agreement | None, problem: Exception | None = None) -> Any:
        """Loads what is asked for, or restated; raises `problem`, of this rank, where all ranks expect it."""
        from megatron_datastates.mcore.load import optimizer_layout

        restores = state.current().restores_providers
        with state.opened(restores_providers=lambda: False):  # a fully parallel load calls its strategy twice
            restated = optimizer_layout.restated_where_needed(self._arguments, agreement, problem)
            loaded = self._start(restated)
        if restores() and is_ours(self._directory):
            from megatron_datastates.mcore.errors import load_errors
            from megatron_datastates.mcore.load.restoring import restore_registered

            with load_errors():
                restore_registered(open_checkpoint(self._directory))
        return loaded


def _agreement_of(arguments: dict[str, Any]) -> Agreement | None:
    """Returns None if no other rank is known to take part in this load."""
    from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag

    group = arguments.get("process_group")  # since 0.19
    strict = parse_strict_flag(arguments["strict"])
    gathers = arguments["validate_access_integrity"] or StrictHandling.requires_global_app_metadata(strict)
    is_parallel = _is_parallel(arguments["sharded_strategy"])
    if not (gathers or is_parallel or state.current().in_training_loop) or len(ranks_of(group)) < 2:
        return None
    return Agreement(arguments["checkpoint_dir"], group, is_parallel=is_parallel, gathers=gathers)


def _is_parallel(strategy: Any) -> bool:
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    parallel = isinstance(strategy, FullyParallelLoadStrategyWrapper)
    return parallel and len(ranks_of(strategy.parallelization_group)) > 1


def wrap_validate_integrity_and_strict_load(
    original: Callable[..., Any], sharded_state_dict: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps `validate_integrity_and_strict_load`, which receives the gathered metadata and may raise."""
    agreement = state.current().agreement
    everyone = parameters_of(original).of_call((sharded_state_dict, *args), kwargs).get("global_metadata")
    if agreement is not None:
        agreement.begin(everyone)
    try:
        _warn_of_another_model(everyone)
        return original(sharded_state_dict, *args, **kwargs)
    except Exception as error:
        if agreement is None or not agreement.is_parallel:
            raise
        agreement.fail(error)
        return sharded_state_dict, set(), set()


def _warn_of_another_model(everyone: Any) -> None:
    """Logs on rank 0 what the model lacks of a checkpoint whose buckets are not this run's.

    In torch_dist, that is an error: Megatron loads no buckets of other sizes. Of tensors, it says nothing.

    Args:
        everyone: what each rank requests; None if ranks have not said it.
    """
    load = state.current()
    if everyone is None or load.restated is None or not load.in_training_loop or Collectives().rank != 0:
        return
    from megatron_datastates.mcore.load.mismatch import tensors_left_out

    left = tensors_left_out(open_checkpoint(load.directory or ""), everyone)
    if left:
        logger.warning(
            "%s has %d tensors that this run's model lacks: they are left out, with their optimizer state: "
            "%s. If that is not meant, compare the run's arguments with `datastates show`",
            load.directory,
            len(left),
            some_of([repr(key) for key in left], 3),
        )


def wrap_fully_parallel_load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `FullyParallelLoadStrategyWrapper.load`: after it, objects are exchanged as well as tensors."""
    loaded = original(*args, **kwargs)
    agreement = state.current().agreement
    if agreement is not None:
        agreement.end_exchange()
    return loaded


def wrap_exchange_by_distribution(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `exchange_by_distribution` in a fully parallel load; all ranks of the world call it."""
    agreement = state.current().agreement
    if agreement is not None:
        agreement.begin_exchange()
    return original(*args, **kwargs)
