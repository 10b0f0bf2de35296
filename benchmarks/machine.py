"""Describes the machine of a benchmark: date, hardware, system, versions, but nothing that names it.

Needs only Python. What cannot be read is None, never a guess. Also reads this process's resident memory.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

GIB = 1 << 30
_PACKAGES = ("torch", "numpy", "megatron-core", "nvidia-resiliency-ext", "msgspec", "nanobind")
_GPU_FACTS = {
    "name": "name",
    "memory_mib": "memory.total",
    "driver": "driver_version",
    "pcie_generation": "pcie.link.gen.current",
    "pcie_generation_most": "pcie.link.gen.max",
    "pcie_lanes": "pcie.link.width.current",
    "sm_clock_mhz": "clocks.sm",
    "power_limit_w": "power.limit",
}


def describe(folder: Path) -> dict[str, Any]:
    """Returns the description; `folder` is where the benchmark writes."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": gpu(),
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1),
        "memory_limit_gib": memory_limit_gib(),
        "huge_pages": _first_line(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "kernel": platform.release(),
        "file_system": file_system(folder),
        "disk_free_gib": round(shutil.disk_usage(folder).free / GIB, 1),
        "python": platform.python_version(),
        "cuda_of_torch": _cuda_of_torch(),
        "packages": {name: version(name) for name in _PACKAGES},
    }


def cpu() -> str:
    """Returns the processor's model name, or its architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def memory_limit_gib() -> float | None:
    """Returns the memory limit of this process's cgroup, if it has one."""
    limit = _first_line(Path("/sys/fs/cgroup/memory.max"))
    return round(int(limit) / GIB, 1) if limit is not None and limit.isdigit() else None


def file_system(folder: Path) -> str | None:
    """Returns the type of the file system that holds `folder`, such as ext4."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(inside, key=lambda mount: mount[0])[1] if inside else None


def gpu() -> dict[str, Any] | None:
    """Returns what nvidia-smi reports about the first GPU, or None where there is no nvidia-smi."""
    query = ["nvidia-smi", "-i", "0", "--format=csv,noheader,nounits"]
    query.append("--query-gpu=" + ",".join(_GPU_FACTS.values()))
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in output.splitlines()[0].split(",")]
    return dict(zip(_GPU_FACTS, values, strict=False))


def version(package: str) -> str | None:
    """Returns the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def status_bytes(field: str) -> int:
    """Returns a field of this process's status, such as VmRSS (resident now) or VmHWM (its peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def reset_peak() -> None:
    """Measures the peak of this process's resident memory (VmHWM) from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def _cuda_of_torch() -> str | None:
    try:
        import torch  # here: it takes seconds, and may be missing
    except ImportError:
        return None
    return torch.version.cuda


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return None
