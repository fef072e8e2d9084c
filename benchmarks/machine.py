"""What the numbers were measured on, and how much memory this process holds."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("envplan", "numpy", "ortools", "lowtime", "networkx")


def describe_machine() -> dict[str, str]:
    """CPU, cores, memory and versions, as text."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return {
        "CPU": _cpu_model(),
        "cores": str(cores),
        "memory": f"{memory / 2**30:.0f} GB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def memory_bytes() -> int:
    """Resident memory of this process now."""
    return _status("VmRSS")


def peak_memory_bytes() -> int:
    """Most resident memory this process has had.

    Not getrusage's figure, which a child inherits from the parent that started it.
    """
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status says nothing about {field}")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
