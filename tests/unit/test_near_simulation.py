"""The simulation of lost nodes: its arithmetic, against figures computed by hand."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.near_simulation.model import (
    ALL,
    CAUSES,
    INTERRUPTIONS,
    NODE,
    PROCESSES,
    RACK,
    STRATEGIES,
    Outcome,
    Setting,
    Strategy,
    simulate,
)

ALONE, NEAR, COPIES = STRATEGIES
SETTING = Setting()


def outcome(strategy: Strategy, **changes: float) -> Outcome:
    return simulate(strategy, dataclasses.replace(SETTING, **changes))  # type: ignore[arg-type]


def test_the_trace_adds_up() -> None:
    assert sum(count for count, _ in CAUSES.values()) == INTERRUPTIONS == 419
    assert SETTING.failures_a_day == pytest.approx(419 / 54 / 2)  # half of the GPUs
    shares = SETTING.shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares[PROCESSES] == pytest.approx(0.99 * 63 / 419) and shares[RACK] == pytest.approx(
        0.99 * 35 / 419
    )


def test_shared_storage_alone_loses_one_and_a_half_checkpoints_a_failure() -> None:
    found = outcome(ALONE, far_bytes_per_second=SETTING.checkpoint_bytes / 600)
    assert (found.near, found.copies, found.far) == (0.0, 0.0, 1.0)
    assert found.lost_minutes_a_day == pytest.approx(1.5 * 10 * SETTING.failures_a_day, rel=0.01)
    assert found.waited_minutes_a_day == pytest.approx(10 * SETTING.failures_a_day, rel=0.01)


def test_a_near_tier_restores_what_takes_no_node() -> None:
    found, shares = outcome(NEAR, far_bytes_per_second=SETTING.checkpoint_bytes / 600), SETTING.shares()
    assert found.near == pytest.approx(shares[PROCESSES], rel=0.02) and found.copies == 0.0
    node_seconds = SETTING.checkpoint_bytes / 1024 / 3e9
    near, far = (node_seconds + 15) / 60, 15.0
    expected = shares[PROCESSES] * near + (1 - shares[PROCESSES]) * far
    assert found.lost_minutes_a_day == pytest.approx(expected * SETTING.failures_a_day, rel=0.01)


def test_copies_restore_all_but_what_takes_all_nodes() -> None:
    found, shares = outcome(COPIES), SETTING.shares()
    assert found.near == pytest.approx(shares[PROCESSES], rel=0.02)
    assert found.copies == pytest.approx(shares[NODE] + shares[RACK], rel=0.01)
    assert found.far == pytest.approx(shares[ALL], rel=0.1)
    assert outcome(COPIES, all_share=0.0).far < 1e-3


def test_the_node_with_the_copy_may_fail_before_the_restart() -> None:
    day = 86_400.0
    found = outcome(COPIES, all_share=0.0, nodes=64, restart=30 * day)
    setting = dataclasses.replace(SETTING, all_share=0.0, nodes=64)
    shares = setting.shares()
    month = 30 * setting.failures_a_day * (shares[NODE] + 2 * shares[RACK]) / 64  # of one node
    assert found.far == pytest.approx((shares[NODE] + 2 * shares[RACK]) * month, rel=0.1)
    two = simulate(Strategy("", near=True, replicas=2), dataclasses.replace(setting, restart=30 * day))
    assert two.far < found.far / 3


def test_the_same_seed_gives_the_same_figures() -> None:
    assert outcome(COPIES) == outcome(COPIES)
    assert simulate(COPIES, SETTING, seed=2) != outcome(COPIES)
