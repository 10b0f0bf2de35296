"""Which hook points a release has, and what happens where one is missing."""

import importlib
import subprocess
import sys

import pytest

from megatron_datastates.mcore.hooks import versions
from megatron_datastates.mcore.hooks.versions import RELEASES, Hook, release_of

pytestmark = pytest.mark.conformance

PRELUDE = "import sys; sys.path[:0] = ['recipes/cpu']; import stand_ins; stand_ins.install(); "


def run(code: str) -> str:
    """Returns what a new process prints, warnings and errors included."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("version", "first"),
    [
        ("0.15.3", (0, 16)),
        ("0.16.1", (0, 16)),
        ("0.17.1", (0, 17)),
        ("0.18.2+0123abc", (0, 18)),
        ("0.19.2", (0, 19)),
        ("0.20.0rc1", (0, 19)),
        ("1.0", (0, 19)),
        ("core_main", (0, 19)),
    ],
)
def test_a_release_serves_until_the_next_one_that_differs(version, first):
    assert release_of(version).first == first


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.15.3", False),
        ("0.16.1", True),
        ("0.18.2+0123abc", True),
        ("0.19.5", True),
        ("0.20.0rc1", False),
        ("1.0", False),
        ("core_main", False),
    ],
)
def test_releases_with_these_minor_numbers_are_tested(version, tested):
    assert versions.is_tested(version) == tested


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: str(release.first))
def test_every_wrapper_is_there(release):
    for hook in (*release.loading, *release.saving, *release.training):
        module, _, function = hook.wrapper.rpartition(".")
        assert callable(getattr(importlib.import_module(f"megatron_datastates.mcore.{module}"), function))


def test_every_hook_point_of_the_installed_release_is_attached():
    code = (
        "import importlib\n"
        "from megatron_datastates.mcore import DataStatesSaveStrategy\n"
        "from megatron_datastates.mcore.hooks import versions\n"
        "release = versions.installed()\n"
        "for hook in (*release.loading, *release.saving):\n"
        "    try: owner = importlib.import_module(hook.module)\n"
        "    except ImportError: assert hook.need or 'training' in hook.module, hook; continue\n"
        "    for part in hook.name.split('.'): owner = getattr(owner, part)\n"
        "    assert owner._is_datastates_hook, hook\n"
        "print('all')"
    )
    assert run(PRELUDE + code).splitlines()[-1] == "all"


def test_missing_hook_point_for_saving_is_named_and_saving_refused():
    code = (
        "import megatron.core.optimizer.optimizer as o; del o.ChainedOptimizer\n"
        "import megatron.core.dist_checkpointing.strategies.async_utils as a; del a.AsyncCallsQueue.close\n"
        "import megatron_datastates.mcore.save.strategy as s; s.DataStatesSaveStrategy()"
    )
    said = run(PRELUDE + code).splitlines()[-1]
    assert "HookPointError" in said
    release = versions.installed_version().split("+")[0]  # without the commit of the working folder
    assert release in said
    assert "optimizer.optimizer.ChainedOptimizer.step" in said and "async_utils.AsyncCallsQueue.close" in said


def test_missing_hook_point_for_loading_is_named_and_breaks_nothing_else():
    code = (
        "import importlib, megatron_datastates.mcore.hooks.versions as v\n"
        "module = 'megatron.core.dist_checkpointing.core'\n"
        "wrapper = 'load.by_format.wrap_get_filesystem_reader'\n"
        "hook = v.Hook(module, 'Gone.method', wrapper)\n"
        "release = v.dataclasses.replace(v.RELEASES[-1], loading=(hook, *v.RELEASES[-1].loading))\n"
        "v.installed = lambda: release\n"
        "import megatron.core.dist_checkpointing.core as core\n"
        "print(core.check_is_distributed_checkpoint('nowhere'), core.maybe_load_config._is_datastates_hook)"
    )
    said = run(code)
    assert "has no megatron.core.dist_checkpointing.core.Gone.method" in said
    assert said.splitlines()[-1] == "False True", "the other hook points are attached, and Megatron works"


def test_hook_says_where_it_is():
    assert str(Hook("a.b", "C.d", "x.y")) == "a.b.C.d"


@pytest.mark.parametrize("installed", [pytest.param(True, marks=pytest.mark.long), False])
def test_either_queue_serves(installed):
    """Megatron's main announces that its own will go; nvidia-resiliency-ext need not be installed."""
    code = (
        "import sys, types\n"
        "import megatron.core.dist_checkpointing.strategies.async_utils as a; del a.AsyncCallsQueue\n"
        "name = 'nvidia_resiliency_ext.checkpointing.async_ckpt.core'\n"
        "if INSTALLED:\n"
        "    for part in (1, 2, 3): sys.modules['.'.join(name.split('.')[:part])] = types.ModuleType('p')\n"
        "    queue = types.ModuleType(name); sys.modules[name] = queue\n"
        "    class Queue:\n"
        "        def schedule_async_request(self, request): pass\n"
        "        def close(self, abort=False): pass\n"
        "    queue.AsyncCallsQueue = Queue\n"
        "import megatron_datastates.mcore.hooks.attach as t; t.attach_saving()\n"
        "print('attached', Queue.close._is_datastates_hook)"
    ).replace("INSTALLED", str(installed))
    said = run(PRELUDE + code).splitlines()[-1]
    if installed:
        assert said == "attached True"
    else:
        assert "HookPointError" in said and "async_utils.AsyncCallsQueue.close" in said
