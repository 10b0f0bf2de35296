"""Whole training jobs, one after another in one run, as in weeks of training.

A round is a run of Megatron's own loop on two ranks, in one parallel layout. Each of its jobs resumes from
what the last one left, with options drawn at random, and ends in one of many ways. Between jobs, near tiers
are lost, files become old enough to be removed as left-overs, and `prune` runs. A job that nothing disturbs
says what every state has to be, bit for bit, whatever happened before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

from tests.faults.campaign.tally import Campaign, Tally
from tests.support import tiny
from tests.support.ranks import Job, Outcome, RankForge

ROUNDS = 20
JOBS = 8  # of a round, and one that ends it
END = 60  # steps of a run
JOB_SECONDS = 90.0
PEER_SECONDS = 2.5  # after which a launcher kills the ranks that outlive another
OLD_SECONDS = 7200.0
MODULE = "tests.faults.campaign.jobs_rank"
DISTRIBUTED_OPTIMIZER = "--use-distributed-optimizer"
MODELS: tuple[tuple[str, ...], ...] = ((), (), ("--swiglu",), ("--untie-embeddings-and-output-weights",))
# Each with the probability that a job has it.
OPTIONS: tuple[tuple[float, tuple[str, ...]], ...] = (
    (0.7, ("--async-save",)),
    (0.3, ("--datastates-prepared", "off")),
    (0.3, ("--datastates-staging-memory", "8MiB")),
    (0.2, ("--datastates-checksums", "off")),
    (0.15, ("--datastates-paranoid", "on")),
    (0.5, ("--datastates-on-failure", "warn")),
    (0.2, ("--datastates-while-saving", "skip")),
    (0.4, ("--datastates-copy-limit", "10MB")),  # so that fences wait
    (0.2, ("--datastates-write-limit", "20MB")),
    (0.1, ("--datastates-compress", "1")),
    (0.2, ("--datastates-lazy", "off")),
    (0.1, ("--datastates-direct-io", "off")),
    (0.1, ("--datastates-on-damage", "fallback", "--datastates-fallback", "3")),
    (0.2, ("--ckpt-fully-parallel-save",)),
    (0.15, ("--ckpt-assume-constant-structure",)),
    (0.3, ("--save-retain-interval", "6")),
    (0.6, ("--step-delay-ms", "60")),
)
NEAR_OPTIONS: tuple[tuple[float, tuple[str, ...]], ...] = (
    (0.3, ("--datastates-near-keep", "2")),
    (0.3, ("--datastates-near-replicas", "1")),
    (0.3, ("--datastates-drain-every", "3")),
    (0.2, ("--datastates-drain-every", "1000")),
    (0.3, ("--datastates-drain-limit", "2MB")),
)
# Steps at which a fault plan lets a rank fail or die (docs of engine/faults.py).
STEPS = (
    *("reserve", "write", "sync", "open", "truncate", "write index", "rename index", "write manifest"),
    *("rename manifest", "write metadata", "rename metadata", "sync directory of manifest", "remove file"),
    *("durable manifest", "remove manifest", "remove directory", "remove left-over"),
)
NEAR_STEPS = ("drain read", "drain write", "drain sync", "drain rename", "replica read")
MISHAPS = ("ENOSPC", "EIO", "kill", "kill", "stall=400")
_PUBLISHED = re.compile(r"datastates: published \w+ save of [^\n]*?/iter_(\d+)( \(so far in near tiers\))?")

State = dict[str, str]


def run(campaign: Campaign) -> Tally:
    root = Path(__file__).parents[3]
    with RankForge(tiny.PRELOAD, (*tiny.PATH, root)) as forge:
        return campaign.play("jobs", ROUNDS, lambda *one: _Round(forge, *one).play())


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What one job does."""

    ending: str
    near: str  # its near tier; "" without one
    options: list[str]
    faults: dict[str, str]  # environment

    @property
    def is_disturbed(self) -> bool:
        return self.ending in ("kill", "kill one", "fault")


@dataclasses.dataclass(frozen=True)
class _Trace:
    """What one job did, as far as its ranks could note it."""

    outcome: Outcome
    states: list[list[tuple[int, State]]]  # of each rank: as it began, then after each step

    @property
    def far(self) -> list[int]:
        return [int(found[1]) for found in _PUBLISHED.finditer(self._of_rank_0) if not found[2]]

    @property
    def near(self) -> list[int]:
        return [int(found[1]) for found in _PUBLISHED.finditer(self._of_rank_0) if found[2]]

    @property
    def has_begun(self) -> bool:
        return all(self.states)

    @property
    def last(self) -> int:
        return self.states[0][-1][0]

    @property
    def _of_rank_0(self) -> str:
        return self.outcome.log.partition("--- rank1")[0]


class _Round:
    def __init__(self, forge: RankForge, tally: Tally, round_: int, rng: random.Random, folder: Path) -> None:
        self._forge, self._tally, self._round, self._rng, self._folder = forge, tally, round_, rng, folder
        self._run, self._near = tiny.Checkpoints(folder / "run"), folder / "near"
        layout, model = rng.choice(list(tiny.LAYOUTS.values())), rng.choice(MODELS)
        lacks = {DISTRIBUTED_OPTIMIZER} if rng.random() < 0.25 else set()
        given = (tiny.RECIPES / "tiny.args").read_text().split()
        length = ("--train-iters", str(END), "--lr-decay-iters", str(END))
        self._arguments = [one for one in given if one not in lacks] + [*layout, *model, *length]
        self._arguments += ["--ckpt-format", "datastates", "--logging-level", "20"]
        self._jobs = 0
        self._trail: list[str] = []  # for a violation
        self._near_used, self._near_newest = "", 0  # of the last job

    def play(self) -> None:
        reference = self._finish(self._start(_Plan("end", "", [], {}), self._folder / "reference"))
        expected = [dict(of_rank) for of_rank in reference.states]
        assert reference.last == END
        for _ in range(JOBS):
            if (self._run.tracked() or 0) < END:
                self._between_jobs()
                self._play_job(self._draw(), expected)
        if (self._run.tracked() or 0) < END:
            self._play_job(_Plan("end", "", [], {}), expected)
        if self._run.tracked() != END:
            self._violate(f"the run has ended, and the tracker names {self._run.tracked()}")
            return
        ours, theirs = self._run.at(END), tiny.Checkpoints(self._folder / "reference").at(END)
        code, text = self._command("diff", ours, theirs)
        if code:
            self._violate(f"the last checkpoint differs: {text[-2000:]}")

    # -- a job -------------------------------------------------------------------------------------------

    def _draw(self) -> _Plan:
        rng = self._rng
        ending = rng.choice(["kill", "kill", "kill one", "term", "exit", "fault", "fault", "fault"])
        options = ["--save-interval", rng.choice(["1", "2", "3"])]
        near = rng.choice(["", "shared", "each-$RANK"])
        for likely, option in OPTIONS + (NEAR_OPTIONS if near else ()):
            options += option if rng.random() < likely else ()
        if near:
            options += ["--datastates-near", str(self._near / near)]
        if ending == "exit":
            options += ["--exit-interval", str(rng.randint(2, 9))]
        if ending == "term":
            options += ["--exit-signal-handler"]
        faults = {}
        if ending == "fault":
            steps = STEPS + (NEAR_STEPS if near else ())
            plan = [f"{rng.choice(steps)}:{rng.randint(1, 6)}:{rng.choice(MISHAPS)}" for _ in range(2)]
            faults = {f"TINY_FAULTS_OF_RANK_{rng.randrange(tiny.RANKS)}": ",".join(plan)}
        return _Plan(ending, near, options, faults)

    def _start(self, plan: _Plan, save: Path) -> Job:
        self._jobs += 1
        where = ["--save", str(save), "--load", str(save)]
        return self._forge.start(
            f"{MODULE}:train",
            ranks=tiny.RANKS,
            logs=self._logs,
            arguments=[self._arguments + plan.options + where, str(self._logs)],
            environment=plan.faults,
        )

    @property
    def _logs(self) -> Path:
        return self._folder / f"job{self._jobs}"

    def _finish(self, job: Job) -> _Trace:
        """Waits for a job as a launcher does: ranks that outlive another one that failed are killed."""
        deadline, failed_at = time.monotonic() + JOB_SECONDS, 0.0
        while None in (codes := job.exits()):
            if any(codes):
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > PEER_SECONDS:
                    job.kill()
            if time.monotonic() > deadline:
                job.wait(0.0)  # raises, with the stacks
            time.sleep(0.01)
        states = [_states_in(self._logs / f"rank{rank}.jsonl") for rank in range(tiny.RANKS)]
        return _Trace(Outcome([code for code in codes if code is not None], job.log()), states)

    def _disturb(self, job: Job, plan: _Plan) -> None:
        """Sends a signal at a random time from the first step on."""
        rng, notes = self._rng, self._logs / "rank0.jsonl"
        pause, victim = rng.uniform(0.0, 2.0), rng.randrange(tiny.RANKS)
        if plan.ending not in ("kill", "kill one", "term"):
            return
        with contextlib.suppress(AssertionError):  # the job has ended by then
            job.wait_until(lambda: notes.exists() and notes.stat().st_size > 0, JOB_SECONDS)
            time.sleep(pause)
        number = signal.SIGTERM if plan.ending == "term" else signal.SIGKILL
        for rank, pid in enumerate(job.pids):
            if job.exits()[rank] is None and (plan.ending == "kill" or rank == victim):
                os.kill(pid, number)

    def _play_job(self, plan: _Plan, expected: list[dict[int, State]]) -> None:
        tracked = self._run.tracked() or 0
        least = max(tracked, self._near_newest if plan.near and plan.near == self._near_used else 0)
        self._trail.append(f"{plan.ending} {' '.join(plan.options)} {plan.faults or ''}")
        job = self._start(plan, self._run.root)
        self._disturb(job, plan)
        trace = self._finish(job)
        self._tally.count(f"jobs: {plan.ending}, {plan.near or 'no near tier'}")
        self._judge(plan, trace, least)
        if trace.has_begun:
            self._compare(trace, expected)
        is_same = plan.near == self._near_used
        self._near_newest = max([self._near_newest * is_same, *trace.near], default=0) if plan.near else 0
        self._near_used = plan.near
        shutil.rmtree(self._logs)

    # -- what came of it ---------------------------------------------------------------------------------

    def _judge(self, plan: _Plan, trace: _Trace, least: int) -> None:
        codes, log, tracked = trace.outcome.exits, trace.outcome.log[-3000:], self._run.tracked() or 0
        allowed = (0, 1, -signal.SIGKILL) if plan.is_disturbed else (0,)
        if any(code not in allowed for code in codes):
            self._violate(f"exit codes {codes}: {log}")
        if not trace.states[0]:
            self._tally.count("jobs that did not begin")
            if plan.ending != "fault":  # which may end what near tiers have yet to bring to --load
                self._violate(f"it did not begin: {log}")
        elif trace.states[0][0][0] < least:
            self._violate(f"resumed from {trace.states[0][0][0]}, and {least} was published: {log}")
        if not any(codes) and not plan.is_disturbed and trace.has_begun and tracked != trace.last:
            self._violate(f"ended well after step {trace.last}, and the tracker names {tracked}: {log}")
        if not plan.near and tracked < max(trace.far[:-1], default=0):
            self._violate(f"published {trace.far}, and the tracker names {tracked}: {log}")
        if tracked and tracked not in self._run.complete():
            self._violate(f"the tracker names {tracked}, complete are {self._run.complete()}: {log}")
        if self._run.complete():
            code, text = self._command("verify", "--all", self._run.root)
            # What killed saves have left cannot be checked, and is no fault.
            if code not in (0, 2) or (tracked and f"/iter_{tracked:07d}: good" not in text):
                self._violate(f"verify: {code}: {text[-2000:]}")

    def _compare(self, trace: _Trace, expected: list[dict[int, State]]) -> None:
        for rank, states in enumerate(trace.states):
            for at, (step, state) in enumerate(states):
                then = expected[rank][step]
                names = {
                    name
                    for name in state.keys() | then.keys()
                    if name != tiny.DRAWN_BY_LOADER and not (at == 0 and name.startswith("loss "))
                }
                unequal = sorted(name for name in names if state.get(name) != then.get(name))
                self._tally.count("states compared" if at else "resumed states compared")
                if unequal:
                    self._violate(f"rank {rank}, {'after' if at else 'loaded'} step {step}: {unequal[:5]}")
                    return

    def _command(self, *arguments: str | Path) -> tuple[int, str]:
        logs = self._folder / "command"
        outcome = self._forge.run(
            f"{MODULE}:command", ranks=1, logs=logs, arguments=list(map(str, arguments)), timeout_seconds=60.0
        )
        shutil.rmtree(logs)
        return outcome.exits[0], outcome.log

    # -- between jobs ------------------------------------------------------------------------------------

    def _between_jobs(self) -> None:
        rng = self._rng
        if rng.random() < 0.3:
            self._age()
        if rng.random() < 0.15:
            shutil.rmtree(self._near, ignore_errors=True)
            self._near_newest = 0
            self._trail.append("near tiers lost")
        if rng.random() < 0.25 and self._run.tracked():
            code, text = self._command("prune", self._run.root, "--keep-last", rng.choice("12"), "--yes")
            self._trail.append("prune")
            if code:
                self._violate(f"prune: {code}: {text[-2000:]}")

    def _age(self) -> None:
        """Makes all files old, so that what is left over may be removed."""
        self._trail.append("hours later")
        then = time.time() - OLD_SECONDS
        for path in [*self._run.root.rglob("*"), *self._near.rglob("*")]:
            os.utime(path, (then, then), follow_symlinks=False)

    def _violate(self, what: str) -> None:
        self._tally.violate(self._round, f"{what}\n    after: " + "\n    ".join(self._trail))


def _states_in(path: Path) -> list[tuple[int, State]]:
    """Returns what a rank has noted, without a last line that it did not finish."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [(step, state) for step, state in map(json.loads, whole.splitlines())]
