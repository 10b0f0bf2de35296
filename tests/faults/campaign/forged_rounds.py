"""A round of `forged`, in a forked process: one forgery, and all that reads a checkpoint."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException

from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.optimizer import optimizer_state
from megatron_datastates.pipeline.upkeep.repair import repair
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.faults.campaign import forging, forging_objects, forging_structures, forging_torch_dist, patterns
from tests.faults.campaign.forging import Claims, Forgery, forged_by
from tests.faults.campaign.isolated import Found
from tests.faults.campaign.judging import NO_MEMORY, command

# One of them is what a round forges, by its number.
TURNS = (
    *forging_structures.FORGERIES,
    *forging_objects.FORGERIES,
    *forging_structures.FORGERIES,
    *forging_torch_dist.FORGERIES,
)
OUTSIDE = ("/etc/", "/outside/")


def prepare(facts: dict[str, Any]) -> None:
    forging_torch_dist.sound()
    forging_objects.deflated()
    forged_by(forging_structures.manifest, 0)
    command("--help")


def play(round_: int, seed: int, folder: Path, facts: dict[str, Any]) -> Found:
    forgery = forged_by(TURNS[round_ % len(TURNS)], seed)
    directory = folder / "run" / "iter_0000005"
    directory.mkdir(parents=True)
    (folder / "outside").mkdir()
    (folder / "outside" / "secret").write_bytes(b"secret")
    for name, data in forgery.files.items():
        (directory / name).write_bytes(data)
    os.chdir(folder)
    opened: list[str] = []
    sys.addaudithook(lambda event, arguments: _note(opened, event, arguments))
    found = Found()
    found.count(f"forged: {forgery.kind}")
    judge = _Judge(found, forgery, directory, random.Random(seed))
    try:
        judge.ours() if forgery.claims else judge.torch_dist()
        judge.commands()
    except BaseException as error:
        error.add_note(f"forged {forgery.kind}: {forgery.text}")
        raise
    outside = [path for path in opened if any(word in path for word in OUTSIDE)]
    if outside:
        found.violate(f"it opened {outside}")
    if Path(forging_objects.CANARY).exists() or (directory / forging_objects.CANARY).exists():
        found.violate("it ran code of the checkpoint")
    found.violations = [f"{each}\n        forged {forgery.kind}: {forgery.text}" for each in found.violations]
    return found


def _note(opened: list[str], event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir") and arguments:
        opened.extend(str(Path(path).absolute()) for path in arguments[:1] if isinstance(path, str))
    if event in (
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "subprocess.Popen",
        "socket.connect",
        "ctypes.dlopen",
    ):
        opened.append(f"/etc/{event}")


class _Judge:
    def __init__(self, found: Found, forgery: Forgery, directory: Path, rng: random.Random) -> None:
        self._found, self._forgery, self._directory, self._rng = found, forgery, directory, rng

    def tried(self, what: str, act: Callable[[], Any]) -> tuple[bool, Any]:
        """Returns whether it succeeded, and what came of it. Only our errors are refusals."""
        try:
            made = act()
        except (DataStatesError, CheckpointingException) as error:
            if not str(error) or any(word in str(error) for word in NO_MEMORY):
                self._found.violate(f"{what} ran out of memory, or does not say why: {error}")
            self._found.count(f"refused: {what}")
            return False, None
        self._found.count(f"done: {what}")
        return True, made

    # -- our format -----------------------------------------------------------------------------------

    def ours(self) -> None:
        claims = self._forgery.claims
        assert claims is not None
        done, checkpoint = self.tried("open", lambda: Checkpoint.open(self._directory, reuse=False))
        refused = not done
        if done:
            refused = self._read_all(checkpoint, claims)
            self._read_optimizer_state(checkpoint, claims)
        done, verdict = self.tried("verify", lambda: verify(self._directory))
        if refused and done and verdict.good:
            self._found.violate("a load refuses it, and verify finds nothing")
        if self._rng.random() < 0.4:
            self._load_by_megatron(claims)
        if self._rng.random() < 0.3:
            self._repair(claims)

    def _read_all(self, checkpoint: Checkpoint, claims: Claims) -> bool:
        """Returns whether something was refused."""
        done, keys = self.tried("keys", lambda: [*checkpoint.index.tensors])
        if not done:
            return True
        results = [self._read_tensor(checkpoint, key, claims) for key in keys]
        results += [self._read_object(checkpoint, key, claims) for key in checkpoint.index.objects]
        return not all(results)

    def _read_tensor(self, checkpoint: Checkpoint, key: str, claims: Claims) -> bool:
        done, tensor = self.tried("tensor", lambda: checkpoint.read_tensor(key))
        if done:
            self._expect(f"tensor {key!r}", _bytes(tensor), claims.tensor(key))
        return done

    def _read_object(self, checkpoint: Checkpoint, key: str, claims: Claims) -> bool:
        done, data = self.tried("object's bytes", lambda: checkpoint.read_object_bytes(key))
        if done:
            self._expect(f"object {key!r}", data, claims.object(key))
        done, _ = self.tried("object", lambda: checkpoint.read_object(key))
        return done

    def _expect(self, what: str, loaded: bytes, honest: bytes | None) -> None:
        if honest is None:
            self._found.violate(f"{what} was loaded, and nothing honest says what it is")
        elif loaded != honest:
            self._found.violate(f"{what} was loaded with wrong bytes")

    def _read_optimizer_state(self, checkpoint: Checkpoint, claims: Claims) -> None:
        done, states = self.tried("optimizer state", lambda: optimizer_state(checkpoint))
        for key, state in states.items() if done else ():
            done, tensor = self.tried("state of a parameter", lambda one=state: one.read())
            if done and self._forgery.kind != "optimizer map":
                bucket = claims.tensor(f"{forging.GROUP}.{forging.BUCKET}.exp_avg")
                item = tensor.element_size()  # an index may say that the bucket has other numbers
                honest = None if bucket is None else bucket[2 * item : 14 * item]
                self._expect(key, _bytes(tensor), honest)
            elif done:
                self._expect(key, _bytes(tensor), self._state_by_map(checkpoint, key, claims))

    def _state_by_map(self, checkpoint: Checkpoint, key: str, claims: Claims) -> bytes | None:
        """Computes optimizer state element by element, as the map in the checkpoint describes it."""
        import itertools
        import json

        value = json.loads(checkpoint.read_object(forging.MAP_KEY)[0])
        made: dict[tuple[int, ...], bytes] = {}
        shape: list[int] = []
        for bucket in value["buckets"]:
            for state, parameter in itertools.product(bucket["states"], bucket["parameters"]):
                stored = claims.tensor(f"{forging.GROUP}.{bucket['name']}.{state}")
                for shard in parameter["shards"]:
                    if (
                        key != f"optimizer.state.{state}.{shard['key']}"
                        or not shard["main"]
                        or stored is None
                    ):
                        continue
                    shape = shard["global_shape"]
                    for inner in itertools.product(*map(range, shard["shape"])):
                        element = tuple(o + i for o, i in zip(shard["offset"], inner, strict=True))
                        at = parameter["begin"] + shard["start"]
                        at += sum(i * stride for i, stride in zip(inner, shard["strides"], strict=True))
                        if element in made or at >= parameter["end"]:
                            return None
                        made[element] = stored[4 * at : 4 * at + 4]
        wanted = list(itertools.product(*map(range, shape)))
        return b"".join(made[each] for each in wanted) if made.keys() == set(wanted) else None

    def _load_by_megatron(self, claims: Claims) -> None:
        """Loads by Megatron as if the honest checkpoint were there."""
        patterns.join_alone()
        wanted = {
            "w": ShardedTensor.from_rank_offsets("w", torch.full((4, 6), -1.0)),
            "c": ShardedTensor.from_rank_offsets("c", torch.full((6, 4), -1.0, dtype=torch.bfloat16)),
            "o": ShardedObject("o", None, (1,), (0,)),
        }
        done, state = self.tried(
            "Megatron's load", lambda: dist_checkpointing.load(wanted, str(self._directory))
        )
        for key in ("w", "c") if done else ():
            self._expect(f"tensor {key!r} by Megatron", _bytes(state[key]), claims.tensor(key))

    def _repair(self, claims: Claims) -> None:
        copied = Path(shutil.copytree(self._directory, self._directory.parent / "iter_0000006"))
        (copied / MANIFEST_NAME).unlink(missing_ok=True)
        done, _ = self.tried("repair", lambda: repair(copied))
        if done:
            self._read_all(Checkpoint.open(copied, reuse=False), claims)
        shutil.rmtree(copied)

    # -- torch_dist -----------------------------------------------------------------------------------

    def torch_dist(self) -> None:
        done, source = self.tried("open torch_dist", lambda: open_source(self._directory))
        if done:
            self._read_source(source)

    def _read_source(self, source: Source) -> None:
        for key in source.tensors:
            done, tensor = self.tried("tensor of torch_dist", lambda k=key: source.read_tensor(k))
            if done:
                honest = forging_torch_dist.tensor(self._forgery.files, key)
                self._expect(f"tensor {key!r}", _bytes(tensor), None if honest is None else _bytes(honest))
        for key in source.objects:
            self.tried("object of torch_dist", lambda k=key: source.read_object(k))

    # -- commands -------------------------------------------------------------------------------------

    def commands(self) -> None:
        directory, rng = self._directory, self._rng
        keys = [
            "w",
            "s",
            "o/shard_0_1",
            "o",
            forging.COMMON_KEY,
            forging.MAP_KEY,
            "optimizer.state.exp_avg.p",
        ]
        choices: list[tuple[Any, ...]] = [
            ("ls", directory.parent),
            ("show", directory),
            ("show", directory, "--stats"),
            ("show", directory, "--optimizer", "--stats"),
            ("show", directory, "--json"),
            ("cat", directory, rng.choice(keys)),
            ("cat", directory, rng.choice(keys), "--json"),
            ("verify", directory),
            ("verify", directory, "--quick", "--json"),
            ("diff", directory, directory),
            ("export", directory, directory.parent / "exported"),
            ("prune", directory.parent, "--keep-last", 1),
        ]
        for arguments in rng.sample(choices, 3):
            code, output = command(*arguments)
            self._found.count(f"command {arguments[0]}: {code}")
            if any(word in output for word in NO_MEMORY):
                self._found.violate(f"{arguments[0]} ran out of memory: {output[-500:]}")
        self._convert(rng.choice(["datastates", "torch_dist"]))

    def _convert(self, form: str) -> None:
        target = self._directory.parent / "made"
        code, output = command("convert", self._directory, target, "--to", form, "--workers", 1)
        self._found.count(f"command convert: {code}")
        if any(word in output for word in NO_MEMORY):
            self._found.violate(f"convert ran out of memory: {output[-500:]}")
        if code:
            if target.exists():
                self._found.violate(f"convert ended with {code} and left its target")
            return
        made = open_source(target)
        for key in made.tensors:
            claims = self._forgery.claims
            honest = claims.tensor(key) if claims else forging_torch_dist.tensor(self._forgery.files, key)
            wanted = _bytes(honest) if isinstance(honest, torch.Tensor) else honest
            self._expect(f"tensor {key!r}, converted", _bytes(made.read_tensor(key)), wanted)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
