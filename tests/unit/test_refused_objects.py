"""Kinds of objects that are refused: the save fails, unless the user trusts the class or all objects."""

from __future__ import annotations

import collections
import dataclasses
import enum
import fractions
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import megatron_datastates as ds
from megatron_datastates.errors import CorruptDataError, SaveFailedError, UnsafeObjectError
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.upkeep.verify import Verdict, _check_object, verify
from megatron_datastates.providers.objects import check_saved, check_stored, deserialize
from tests.unit.by_hand import Part, index_of, write_checkpoint
from tests.unit.states import OPTIONS, SMALL, new_saver, save
from tests.unit.stored_objects import archive, stored


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    hidden: int = 8


class Own:
    pass


class Numbers(list):  # type: ignore[type-arg]
    pass


class WithState(dict):  # type: ignore[type-arg]
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "enumeration": (Colour.RED, "Colour"),
    "dataclass": (Config(), "Config"),
    "class": (Own(), "Own"),
    "type": (Own, "Own"),
    "subclass": (WithState(a=1), "WithState"),
    "Fraction": (fractions.Fraction(1, 3), "fractions.Fraction"),
    "function": (len, "builtins.len"),
    "array of objects": (np.array([None]), "dtype 'O8'"),
    "dtype of objects": (np.dtype("O"), "dtype 'O8'"),
    "structured with objects": (np.zeros(1, [("a", "O")]), "dtype"),
    "generator": (np.random.default_rng(0), "numpy.random"),
    "masked array": (np.ma.array([1], mask=[True]), "numpy.ma"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_object_that_no_load_accepts_fails_the_save(saver: Saver, tmp_path: Path, kind: str) -> None:
    value, name = REFUSED[kind]
    publication = save(saver, tmp_path / "c", {"w": torch.ones(3)}, {"the key": [{"deep": (value,)}]})
    assert publication.outcome is Outcome.FAILED and publication.error is not None
    for words in ("'the key'", name, "state_dict()", "add_safe_globals", "docs/options.md#trust-objects"):
        assert words in publication.error
    assert "--datastates-trust-objects on; of ds.save and ds.load: trust_objects=True" in publication.error
    assert len(publication.error.split()) < 75
    cause = publication.save.cause
    assert cause is not None and cause.__cause__ is None, "the message stands in the traceback once"
    publication.save.join()  # the finishing thread reports the failure, then removes its file
    assert not list((tmp_path / "c").glob("*"))


def test_a_corrupt_tensor_in_an_object_is_damage_even_where_all_objects_are_trusted() -> None:
    buffer, tensor = io.BytesIO(), torch.arange(1000)
    torch.save([tensor], buffer)
    data = bytearray(buffer.getvalue())
    data[data.index(tensor.numpy().tobytes()) + 5] ^= 1
    for trust in (False, True):
        with pytest.raises(CorruptDataError, match="the CRC-32 of its data/0 differs"):
            check_stored(bytes(data), "k", trust=trust)
    verdict = Verdict()
    _check_object(bytes(data), "k", dataclasses.replace(OPTIONS, trust_objects=True), verdict)
    assert len(verdict.faults) == 1 and not verdict.notes


SHARED = torch.ones(2)


class Raises:
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error("no pickle")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            [SHARED, SHARED.view(torch.int32)],
            "RuntimeError: Cannot save multiple tensors or storages that view",
        ),
        (Raises(RuntimeError), "RuntimeError: no pickle"),
        (Raises(ValueError), "ValueError: no pickle"),
        (Raises(KeyError), "KeyError: 'no pickle'"),
    ],
    ids=["views", "RuntimeError", "ValueError", "KeyError"],
)
def test_an_object_that_torch_cannot_save_is_named(value: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(SaveFailedError, match=rf"'a\.b' was not saved, as it cannot be pickled: {reason}"):
        ds.save({"a": {"b": value}}, tmp_path)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("trust", [False, True])
def test_a_part_of_a_tensor_is_no_object(trust: bool, tmp_path: Path) -> None:
    """torch trusts DTensors in any program that has imported them, and in no other."""
    mesh = init_device_mesh("cpu", (1,))
    value = [DTensor.from_local(torch.ones(2), mesh, [Shard(0)])]
    with torch.serialization.safe_globals([DTensor]):
        with pytest.raises(SaveFailedError, match=r"'x' was not saved.*DTensor.*ds\.Shard") as found:
            ds.save({"x": value}, tmp_path / "c", **SMALL, trust_objects=trust)
        assert "add_safe_globals" not in str(found.value)


@pytest.mark.parametrize("value", [Colour.RED, Config(3), [Own], collections.defaultdict(Config)])
def test_a_class_that_the_user_trusts_is_saved_and_loaded(tmp_path: Path, value: Any) -> None:
    with torch.serialization.safe_globals([Colour, Config, Own]):
        ds.save({"x": [value, torch.ones(2)]}, tmp_path / "c", **SMALL)
        assert ds.open(tmp_path / "c", **SMALL).read_object("x")[0] == value
    with pytest.raises(UnsafeObjectError, match=r"'x' was not loaded.*(Colour|Config|Own).*add_safe_globals"):
        ds.open(tmp_path / "c", **SMALL).read_object("x")


@pytest.mark.parametrize("value", [WithState(a=1), Numbers([1, 2])], ids=["dict", "list"])
def test_a_subclass_of_a_container_is_refused_even_if_it_is_trusted(tmp_path: Path, value: Any) -> None:
    kind = type(value).__base__.__name__
    with torch.serialization.safe_globals([WithState, Numbers]):
        with pytest.raises(SaveFailedError, match=rf"'x' .* trusted: store {kind}\(\.\.\.\)") as found:
            ds.save({"x": [value]}, tmp_path / "c", **SMALL)
        assert "add_safe_globals" not in str(found.value)


def test_a_check_calls_no_class_of_the_users() -> None:
    calls: list[int] = []

    class Loud:
        def __setstate__(self, state: Any) -> None:
            calls.append(1)

    Loud.__qualname__ = "Loud"
    globals()["Loud"] = Loud
    loud = Loud()
    loud.__dict__["a"] = 1
    with torch.serialization.safe_globals([Loud]):
        data = stored([loud])
        check_saved(data, "key")
        assert calls == []
        deserialize(data, "key")
        assert calls == [1]


def test_objects_that_are_trusted_by_option_are_saved_and_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publication = save(new_saver(trust_objects=True), tmp_path / "c", {}, {"x": [Colour.RED]})
    assert publication.outcome is Outcome.PUBLISHED, publication.error
    trusting = dataclasses.replace(OPTIONS, trust_objects=True)
    assert Checkpoint.open(tmp_path / "c", trusting).read_object("x") == [Colour.RED]
    warned = [record.message for record in caplog.records if "--datastates-trust-objects" in record.message]
    assert len(warned) == 2 and "can be loaded only with --datastates-trust-objects on" in warned[0]
    with pytest.raises(UnsafeObjectError, match="was not loaded"):
        ds.open(tmp_path / "c", **SMALL).read_object("x")
    assert verify(tmp_path / "c", options=trusting).good
    (fault,) = verify(tmp_path / "c", options=OPTIONS).faults
    assert "'x' cannot be loaded" in fault and "Colour" in fault


def test_verify_finds_an_object_that_cannot_be_loaded(tmp_path: Path) -> None:
    data = stored([fractions.Fraction(1, 3)])
    part = Part(data_bytes=8192, objects={"x": (4096, data)})
    write_checkpoint(tmp_path, [part], index_of([], {"x": 0}))
    (fault,) = verify(tmp_path, options=OPTIONS).faults
    assert "'x' cannot be loaded" in fault and "fractions.Fraction" in fault


def test_classes_that_megatron_trusts_are_no_fault_without_megatron() -> None:
    pickled = b"\x80\x02cmegatron.core.transformer.enums\nAttnBackend\nK\x01\x85R."
    check_stored(archive(pickled), "args")
    with pytest.raises(UnsafeObjectError):
        check_stored(archive(pickled.replace(b"AttnBackend", b"Others")), "args")


LOAD_MEGATRONS_CLASS = """
import importlib.abc, pickle, sys, torch
from megatron_datastates.errors import UntrustedClassError
from megatron_datastates.providers.objects import deserialize

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "megatron":
            raise ModuleNotFoundError("No module named 'megatron'")

if sys.argv[1] == "absent":
    sys.meta_path.insert(0, Absent())
data = sys.stdin.buffer.read()
assert "megatron.core" not in sys.modules
try:
    print(type(deserialize(data, "args")).__module__)
except UntrustedClassError as error:
    print(error)
"""


MEGATRONS = {
    "megatron.core.transformer.enums AttnBackend": b"K\x01\x85R.",
    "megatron.core.rerun_state_machine Call": b"K\x01K\x02\x86\x81.",  # no safe global of Megatron's
}


@pytest.mark.parametrize("name", MEGATRONS)
@pytest.mark.parametrize("installed", ["present", pytest.param("absent", marks=pytest.mark.long)])
def test_a_class_of_megatron_is_loaded_where_megatron_is_installed(installed: str, name: str) -> None:
    module, own = name.split()
    pickled = b"\x80\x02c" + f"{module}\n{own}\n".encode() + MEGATRONS[name]
    command = [sys.executable, "-W", "ignore", "-c", LOAD_MEGATRONS_CLASS, installed]
    done = subprocess.run(command, input=archive(pickled), capture_output=True, check=False)
    refusal = f"object 'args' was not loaded: it contains {module}.{own}, a class"
    printed = module if installed == "present" else refusal
    assert done.stdout.decode().startswith(printed), done.stderr.decode()
    assert "add_safe_globals" not in done.stdout.decode()


# -- optimizers' classes, which Megatron stores with the groups of an offloaded optimizer -------------------


def test_classes_of_optimizers_are_data() -> None:
    group = {"lr": 0.5, "cpu_optimizer_cls": torch.optim.AdamW}
    check_saved(stored(group), "group")
    assert deserialize(stored(group), "group") == group


def test_a_class_of_an_optimizer_that_is_not_installed_is_loaded_by_name() -> None:
    module, name = "transformer_engine.pytorch.optimizers.fused_adam", "FusedAdam"
    pickled = archive(f"\x80\x02c{module}\n{name}\n.".encode("latin1"))
    check_stored(pickled, "class")
    found = deserialize(pickled, "class")
    assert (found.__module__, found.__qualname__) == (module, name)
    assert isinstance(found, type) and module not in sys.modules


@pytest.mark.parametrize("made_by", [b")R", b")\x81"], ids=["called", "made by __new__"])
def test_no_instance_of_an_optimizer_is_made(made_by: bytes) -> None:
    pickled = archive(b"\x80\x02ctorch.optim.adamw\nAdamW\n" + made_by + b".")
    for load in (check_saved, deserialize):
        with pytest.raises(UnsafeObjectError, match="not on the allow list"):
            load(pickled, "optimizer")
