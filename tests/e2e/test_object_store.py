"""Megatron's own loop with --save and --load in an object store (moto's S3 on the loopback)."""

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("multistorageclient")
pytest.importorskip("moto")

from megatron_datastates.mcore.training import loop
from tests.e2e.conftest import STEPS, Reference
from tests.support.object_store import BUCKET, EXPIRED, RUN, UNAVAILABLE, Answer, configure, s3, served
from tests.support.tiny import LAYOUTS, MANIFEST, TRACKER, Pretraining


class Far:
    """The store, for a run's ranks."""

    def __init__(self, tmp_path: Path) -> None:
        self.store, address = served()
        self.store.heal()
        configure(tmp_path / "msc.json", address)
        self.s3 = s3(address)
        for name in self.names():
            self.s3.delete_object(Bucket=BUCKET, Key=name)
        self.near = tmp_path / "near"
        self.environment = {"MSC_CONFIG": str(tmp_path / "msc.json")}

    def arguments(self, *more: str, steps: int = STEPS) -> list[str]:
        return [
            *(*LAYOUTS["tp2"], "--train-iters", str(steps), "--ckpt-format", "datastates", "--async-save"),
            *("--save", RUN, "--load", RUN, "--save-interval", "2", "--enable-msc", *more),
        ]

    def names(self) -> list[str]:
        return [one["Key"] for one in self.s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])]

    def tracked(self) -> str:
        return self.s3.get_object(Bucket=BUCKET, Key=f"run/{TRACKER}")["Body"].read().decode()


def test_megatrons_last_call_is_found() -> None:
    """Where it is not, a job's last uploads wait for the end of the interpreter, and go part by part."""
    found = find_spec("megatron.training")
    assert found is not None and found.origin is not None
    text = Path(found.origin).with_name("training.py").read_text()
    assert f"{loop._LAST_CALL}(blocking=True, terminate=True)" in text


def test_a_run_saves_to_an_object_store_and_resumes_from_it(
    pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    far = Far(tmp_path)
    near = ["--datastates-near", f"{far.near}-$RANK"]
    pretraining.run(*far.arguments(*near, "--exit-interval", "4"), environment=far.environment)
    assert [f"run/iter_{n:07d}/{MANIFEST}" in far.names() for n in (2, 4)] == [True, True]
    assert far.tracked() == "4"

    for path in tmp_path.glob("near-*"):
        path.rename(tmp_path / f"lost-{path.name}")
    resumed = pretraining.run(*far.arguments(*near), environment=far.environment)
    assert resumed.resumed_from(reference("tp2")) == 4
    assert resumed.differences(reference("tp2")) == []
    assert not list(Path.cwd().glob("msc:*"))


@pytest.mark.parametrize("answer", [UNAVAILABLE, pytest.param(EXPIRED, marks=pytest.mark.long)])
def test_training_goes_on_while_the_store_is_away(
    answer: Answer, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    far = Far(tmp_path)
    near = ["--datastates-near", f"{far.near}-$RANK"]
    running = pretraining.start(*far.arguments(*near, "--step-delay-ms", "300"), environment=far.environment)
    running.job.wait_until(lambda: any(tmp_path.glob("near-0/run-*/iter_0000002")), 60)
    far.store.fail(".", answer)
    running.job.wait_until(lambda: any(tmp_path.glob("near-0/run-*/iter_0000004")), 60)  # it has begun
    far.store.heal()

    by_retries = "generator random"  # the client draws from it how long it waits before it asks again
    differences = running.finish().differences(reference("tp2"))
    assert [one for one in differences if not one.endswith(by_retries)] == []
    assert f"run/iter_{STEPS:07d}/{MANIFEST}" in far.names() and far.tracked() == str(STEPS)


@pytest.mark.long
def test_a_killed_run_resumes_from_what_only_the_near_tier_has(
    pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    far, steps = Far(tmp_path), 30  # a save is published some iterations after it
    far.environment["TMPDIR"] = str(tmp_path)  # the near tier that is used where none is given
    far.store.fail(f"PUT .*iter_0000004/{MANIFEST}", UNAVAILABLE)
    killed = pretraining.start(
        *far.arguments("--step-delay-ms", "1000", steps=steps),
        environment=far.environment,
    )
    killed.job.wait_until(lambda: any("iter_0000004/index-" in name for name in far.names()), 90)
    killed.job.kill()
    far.store.heal()
    assert far.tracked() == "2" and f"run/iter_0000004/{MANIFEST}" not in far.names()
    assert len(list(tmp_path.glob("datastates-near-*/run-*"))) == 1

    resumed = pretraining.run(*far.arguments(steps=steps), environment=far.environment)

    uninterrupted = reference("tp2", steps)
    assert "is newer than what is in msc://store/run (iteration 2)" in resumed.log
    assert resumed.resumed_from(uninterrupted) >= 4
    assert resumed.differences(uninterrupted) == []
    assert far.tracked() == str(steps)
