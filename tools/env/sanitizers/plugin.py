"""The pytest plugin of tools/env/sanitizers.sh: fails the test during which a sanitizer reports something.

What belongs here: which tests cannot run under a sanitizer, and which leaks count. What does not: how the
module is built and the sanitizer is set up (sanitizers.sh).
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SANITIZER = os.environ["MDS_SANITIZER"]
REPORTS = Path(os.environ["MDS_SANITIZER_REPORTS"])  # every process writes a file of its own there
TORN = "shows that a source changed too early is noticed"
LATE = "shows that the trainer continues at the fence's deadline, and the save fails"
LEAKS = "leaks on purpose"
LEFT_OUT = {
    "address": {
        "test_structure.py::test_nothing_is_kept_alive_and_a_new_object_at_an_old_address_is_another_one": (
            "needs an address that is used again at once, which the sanitizer prevents"
        ),
        "test_device_errors.py::test_memory_that_stays_page_locked_stays_mapped": LEAKS,
        "test_device_errors.py::test_a_driver_that_refuses_every_wait_holds_no_save_for_ever": LEAKS,
        "test_device_reads.py::test_a_driver_that_refuses_every_wait_ends_the_read": LEAKS,
    },
    "thread": {
        "test_device_order.py::test_without_the_fence_copies_are_torn": TORN,
        "test_device_saves.py::test_a_step_without_the_fence_fails_the_save": TORN,
        "test_device_saves.py::test_a_step_without_the_fence_shows_in_the_checkpoint": TORN,
        "test_device_saves.py::test_strided_tensors_changed_without_the_fence_fail_the_save": TORN,
        "test_device_saves.py::test_the_trainer_continues_at_the_fences_deadline": LATE,
        "test_device_save_failures.py::test_a_fence_that_ends_in_mid_copy_fails_the_save_only": LATE,
        "test_fork.py::test_a_child_can_save_with_an_engine_of_its_own": (
            "in a forked child the sanitizer crashes on a thread that reuses the id of one of the parent's"
        ),
    },
}
OURS = ("_native.", "libfakecuda.so", "planted.so")
# A stack may end in one of these, at a function without frame pointer: then its caller is unknown.
ANYBODYS = ("libasan.so", "libstdc++.so", "libgcc_s.so", "libc.so", "ld-linux")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = LEFT_OUT.get(SANITIZER, {})
    left_out = [item for item in items if item.nodeid.split("/")[-1].split("[")[0] in names]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def no_report() -> Iterator[None]:
    """Fails a test with a new report. It is set up first and ends last, so it covers all other fixtures."""
    before = reports()
    yield
    if reports() != before:
        pytest.fail(f"the {SANITIZER} sanitizer reported a fault: see the reports at the end", pytrace=False)


def pytest_sessionfinish() -> None:
    if SANITIZER == "address":
        report_leaks()


def reports() -> dict[Path, int]:
    """Returns the sanitizer's reports so far, with their sizes in bytes."""
    return {path: path.stat().st_size for path in REPORTS.iterdir()}


def report_leaks() -> None:
    """Checks for leaks, and keeps only the reports about leaks that may be ours.

    Not done at the end of every process: a forked child leaks its parent's engine on purpose.
    """
    gc.collect()
    before = reports()
    ctypes.CDLL(None).__lsan_do_recoverable_leak_check()
    for path in reports():
        old = before.get(path, 0)
        text = path.read_bytes()[old:].decode(errors="replace")
        kept = "".join(f"{leak}\n\n" for leak in text.split("\n\n") if may_be_ours(leak))
        os.truncate(path, old)
        with path.open("a") as file:
            file.write(kept)
        if not path.stat().st_size:
            path.unlink()


def may_be_ours(leak: str) -> bool:
    """Returns whether a paragraph reports a leak whose stack has our code in it, or is too short to know."""
    modules = re.findall(r"\(([^()/]+)\+0x[0-9a-f]+\)$", leak, re.MULTILINE)
    if "LeakSanitizer has encountered a fatal error" in leak:
        return True
    if not re.match(r"\s*(Direct|Indirect) leak", leak):
        return False
    return any(module.startswith(OURS) for module in modules) or all(
        module.startswith(ANYBODYS) for module in modules
    )
