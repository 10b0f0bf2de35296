"""Failures of a cluster, and what each costs with checkpoints in one or two tiers.

Source of the failures: A. Grattafiori et al., "The Llama 3 Herd of Models" (2024, arXiv 2407.21783), section
3.3.4 and table 5: 419 unexpected interruptions in 54 days on 16,384 GPUs, by cause; all 18 rows have the
table's counts (compared with copies of it, 2026-11-23). What a cause takes away is our reading: bad
hardware, and maintenance of a host, take a node with its near tier; a switch or cable takes a rack of two
nodes, as that cluster had them; software takes processes only. That all near tiers are lost at once is not in
the table: its share is an assumption.

Times are seconds, unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses

import numpy as np

INTERRUPTIONS, DAYS, GPUS = 419, 54, 16_384
GPUS_A_NODE = 8
_DAY = 86_400.0
PROCESSES, NODE, RACK, ALL = "processes", "a node", "a rack of two nodes", "all nodes"
CAUSES = {  # how many of the interruptions, and what is lost with them
    "faulty GPU": (148, NODE),
    "GPU memory (HBM3)": (72, NODE),
    "software bug": (54, PROCESSES),
    "network switch or cable": (35, RACK),
    "unplanned maintenance of a host": (32, NODE),
    "GPU memory (SRAM)": (19, NODE),
    "GPU system processor": (17, NODE),
    "network card": (7, NODE),
    "NCCL watchdog timeout": (7, PROCESSES),
    "silent data corruption": (6, NODE),
    "GPU thermal interface or sensor": (6, NODE),
    "SSD": (3, NODE),
    "power supply": (3, NODE),
    "server chassis": (2, NODE),
    "I/O expansion board": (2, NODE),
    "dependency": (2, PROCESSES),
    "CPU": (2, NODE),
    "system memory": (2, NODE),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A cluster, its checkpoints and its storage."""

    nodes: int = 1024
    checkpoint_bytes: float = 405e9 * 14  # 405 billion parameters with Adam's state
    far_bytes_per_second: float = 20e9  # what shared storage has for this job's checkpoints, all the time
    near_bytes_per_second: float = 3e9  # of a node's disk
    network_bytes_per_second: float = 5e9  # of a node, for copies
    near_interval: float = 30.0  # between saves with a near tier
    restart: float = 600.0  # until a new job asks for its checkpoint
    all_share: float = 0.01  # of the failures that take all near tiers; assumed

    @property
    def far_seconds(self) -> float:
        """Returns how long a checkpoint takes to shared storage or from there: the interval sustained."""
        return self.checkpoint_bytes / self.far_bytes_per_second

    @property
    def failures_a_day(self) -> float:
        return INTERRUPTIONS / DAYS * self.nodes * GPUS_A_NODE / GPUS

    def shares(self) -> dict[str, float]:
        """Returns the share of each kind of loss among the failures."""
        kinds = {PROCESSES: 0, NODE: 0, RACK: 0}
        for count, kind in CAUSES.values():
            kinds[kind] += count
        traced = {kind: (1 - self.all_share) * count / INTERRUPTIONS for kind, count in kinds.items()}
        return traced | {ALL: self.all_share}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Where checkpoints go."""

    name: str
    near: bool
    replicas: int = 0


STRATEGIES = (
    Strategy("shared storage alone", near=False),
    Strategy("near tier", near=True),
    Strategy("near tier, 1 copy on another node", near=True, replicas=1),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a day costs, on average; and what restored how often, as shares of all failures."""

    near: float
    copies: float
    far: float
    lost_minutes_a_day: float
    waited_minutes_a_day: float  # for the checkpoint at restarts, beside the restart itself


def simulate(strategy: Strategy, setting: Setting, years: float = 100.0, seed: int = 1) -> Outcome:
    """Lets a cluster fail for some years.

    A checkpoint is restored from near tiers if every node's files are on a node that is left. Copies are half
    of the nodes away, so that no rack has both. While a job restarts, nodes go on failing: the node with the
    only copy of a lost one's files may be among them.
    """
    random = np.random.default_rng(seed)
    days = years * 365
    count = random.poisson(setting.failures_a_day * days)
    shares = setting.shares()
    kinds = random.choice(list(shares), size=count, p=list(shares.values()))
    from_near, from_copies = _tiers(strategy, setting, kinds, random)
    far = ~(from_near | from_copies)
    phases = random.random(count)  # of the interval in which a failure falls
    far_interval = max(setting.far_seconds, setting.near_interval if strategy.near else 0.0)
    lost = np.where(
        far,
        setting.far_seconds + phases * far_interval,
        _published_after(strategy, setting) + phases * setting.near_interval,
    )
    # From far it is read; from near tiers it is first brought there. Reads of near tiers hardly count.
    waited = np.full(count, setting.far_seconds)
    return Outcome(
        near=float(from_near.mean()),
        copies=float(from_copies.mean()),
        far=float(far.mean()),
        lost_minutes_a_day=float(lost.sum()) / 60 / days,
        waited_minutes_a_day=float(waited.sum()) / 60 / days,
    )


def _tiers(
    strategy: Strategy, setting: Setting, kinds: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns which failures are restored from near tiers alone, and which with copies on other nodes."""
    if not strategy.near:
        nothing = np.zeros(len(kinds), bool)
        return nothing, nothing
    lost_nodes = np.select([kinds == NODE, kinds == RACK], [1, 2], 0)
    from_near = kinds == PROCESSES
    if not strategy.replicas:
        return from_near, np.zeros(len(kinds), bool)
    # Nodes that hold the copies of a lost one's files: all of them have to fail, too, before the restart.
    shares = setting.shares()
    nodes_a_day = setting.failures_a_day * (shares[NODE] + 2 * shares[RACK]) / setting.nodes
    fails = 1 - np.exp(-nodes_a_day * setting.restart / _DAY)
    gone = random.random(len(kinds)) < lost_nodes * fails**strategy.replicas
    return from_near, (lost_nodes > 0) & ~gone


def _published_after(strategy: Strategy, setting: Setting) -> float:
    """Returns how long after its state a checkpoint is published near."""
    node_bytes = setting.checkpoint_bytes / setting.nodes
    copying = strategy.replicas * node_bytes / setting.network_bytes_per_second
    return node_bytes / setting.near_bytes_per_second + copying
