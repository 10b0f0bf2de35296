"""What installing the package does to other programs: `import torch` gets one import hook, no more."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_datastates.mcore.hooks import versions
from megatron_datastates.mcore.hooks.activation import WATCHED_MODULES

LIGHT = {"megatron_datastates"} | {
    f"megatron_datastates.{name}" for name in ("mcore", "mcore.hooks", "mcore.hooks.activation")
}
LIST_OURS = "import sys; print(*sorted(m for m in sys.modules if m.startswith('megatron_datastates')))"
HOOKS = (
    "import sys; "
    "print([type(f).__module__ for f in sys.meta_path].count('megatron_datastates.mcore.hooks.activation'))"
)


def run(code: str, **environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_import_torch_loads_the_import_hook_and_nothing_else_of_ours() -> None:
    assert set(run(f"import torch; {LIST_OURS}").split()) == LIGHT


def test_import_hook_imports_nothing_that_torch_has_not_imported() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); "
        "import megatron_datastates.mcore; print(*(set(sys.modules) - before))"
    )
    assert set(run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split()) == LIGHT


def test_watched_modules_are_those_that_the_table_attaches_to_at_import() -> None:
    loading = {hook.module for release in versions.RELEASES for hook in release.loading}
    others = {*versions.MEMORY_SAVERS, *versions.BRIDGE, *versions.TOOLS}
    assert loading | others == WATCHED_MODULES


def test_hooks_of_a_program_in_another_format_do_not_import_the_native_module() -> None:
    code = (
        "import torch, megatron.core.optimizer, megatron.core.dist_checkpointing.serialization; "
        f"import megatron_datastates.mcore.errors; {LIST_OURS}"
    )
    loaded = run(code).split()
    assert "megatron_datastates.mcore.load.optimizer_request" in loaded  # a hook was attached
    assert [module for module in loaded if "native" in module] == []


def test_wrappers_are_named_after_what_they_wrap_and_share_no_name() -> None:
    hooks = {
        hook.wrapper
        for release in versions.RELEASES
        for hook in (*release.loading, *release.saving, *release.training)
    }
    names = [wrapper.rpartition(".")[2] for wrapper in hooks]
    assert all(name.startswith("wrap_") for name in names)
    assert len(set(names)) == len(names)


def test_package_itself_imports_nothing() -> None:
    assert run(f"import megatron_datastates; {LIST_OURS}") == "megatron_datastates"


def test_hook_is_installed_once_by_torch_or_by_hand() -> None:
    assert run(f"import torch; {HOOKS}") == "1"
    assert run(f"import torch, megatron_datastates.mcore as m; m.autoload(); {HOOKS}") == "1"


@pytest.mark.long
def test_hook_is_installed_once_though_our_modules_are_imported_again() -> None:
    again = "for n in [n for n in sys.modules if n.startswith('megatron_datastates')]: del sys.modules[n]\n"
    imported = "import megatron_datastates.mcore, megatron.core.dist_checkpointing.core as c\n"
    code = f"import sys, torch\n{again}{imported}print(c.maybe_load_config._is_datastates_hook)\n{HOOKS}"
    assert run(code).split() == ["True", "1"]


def test_a_folder_with_the_name_of_a_watched_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch_memory_saver").mkdir()
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    assert run(f"import torch; {path}; import torch_memory_saver as m; print(m.__file__)") == "None"


def test_hook_is_installed_by_hand_where_torch_does_not_load_backends() -> None:
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert run(f"import torch; {HOOKS}", **off) == "0"
    assert run(f"import torch, megatron_datastates.mcore; {HOOKS}", **off) == "1"


@pytest.mark.parametrize("text", ["off", "0"])
def test_a_variable_of_our_own_switches_it_off(text: str) -> None:
    code = f"import torch, megatron_datastates.mcore as m; m.autoload(); {HOOKS}; print(torch.ones(1).item())"
    assert run(code, MEGATRON_DATASTATES_ACTIVATE=text).split() == ["0", "1.0"]


def test_what_is_switched_off_does_not_save_through_megatron() -> None:
    """It could not load that."""
    code = (
        "import torch, megatron_datastates as ds\n"
        "try:\n    ds.enable()\n"
        "except ds.errors.OptionError as error:\n    print(error)"
    )
    off = {"MEGATRON_DATASTATES_ACTIVATE": "off"}
    assert run(code, **off).startswith("MEGATRON_DATASTATES_ACTIVATE=off: this process attaches to nothing")


def test_another_value_of_that_variable_is_said_and_activates_nothing() -> None:
    code = f"import os, sys; os.dup2(1, 2); import torch; {HOOKS}"
    said = run(code, MEGATRON_DATASTATES_ACTIVATE="maybe").splitlines()
    assert any(
        "megatron_datastates was not activated: OptionError: environment variable "
        "MEGATRON_DATASTATES_ACTIVATE='maybe': expected 1 or 0, on or off" in line
        for line in said
    )
    assert said[-1] == "0"


def test_modules_of_megatron_that_are_loaded_already_are_attached() -> None:
    code = (
        "import torch, megatron.core.dist_checkpointing as d; "
        "import megatron.core.dist_checkpointing.strategies.torch as s, megatron_datastates.mcore; "
        "print(s._get_filesystem_reader._is_datastates_hook, d.load._is_datastates_hook)"
    )
    assert run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "True True"


def test_trouble_of_ours_leaves_megatron_as_it_was() -> None:
    code = (
        "import torch; "
        "import megatron_datastates.mcore.hooks.versions as v; v.release_of = None; "
        "import megatron.core.dist_checkpointing.core as c; print(c.maybe_load_config.__module__)"
    )
    assert run(code) == "megatron.core.dist_checkpointing.core"
