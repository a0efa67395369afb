"""Checks of the limits of memory, address space and descriptors.

May import ``findings``, ``text`` of the command line and ``headroom`` of the
memory.
"""

from __future__ import annotations

import os
import resource

from shmreduce.cli.doctor.findings import Finding
from shmreduce.cli.text import size_text
from shmreduce.memory.headroom import Machine, cgroup_limits

__all__ = [
    "address_space",
    "available_memory",
    "cgroup_memory",
    "mappings",
    "open_files",
    "overcommit",
    "shared_memory_directory",
]

# A check finds fault if less than this is left.
_FEW_FILES = 64
_FEW_MAPPINGS = 1024
# Bytes.
_SMALL_DIRECTORY = 64 << 20
_LITTLE_MEMORY = 512 << 20


def open_files(machine: Machine) -> Finding:
    """Check RLIMIT_NOFILE: a process needs some 32 descriptors for segments."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        in_use = len(list(machine.path("/proc/self/fd").iterdir()))
    except OSError:
        in_use = 0
    value = f"{_limit_text(soft)} (hard limit {_limit_text(hard)}), {in_use} in use here"
    if soft == resource.RLIM_INFINITY or soft - in_use >= _FEW_FILES:
        return Finding("open files", "ok", value)
    return Finding(
        "open files",
        "problem" if soft - in_use < _FEW_FILES // 2 else "warning",
        value,
        "raise it with `ulimit -n 1024` before starting, or LimitNOFILE= in a systemd unit",
    )


def mappings(machine: Machine) -> Finding:
    """Check vm.max_map_count: a process needs some 64 mappings, and more for cow arrays."""
    most = machine.number("/proc/sys/vm/max_map_count")
    if most is None:
        return Finding("memory mappings", "ok", "no limit known")
    in_use = len((machine.text("/proc/self/maps") or "").splitlines())
    value = f"{most} for a process, {in_use} in use here"
    if most - in_use >= _FEW_MAPPINGS:
        return Finding("memory mappings", "ok", value)
    return Finding(
        "memory mappings", "warning", value, "raise it with `sysctl -w vm.max_map_count=65530`"
    )


def shared_memory_directory(machine: Machine) -> Finding:
    """Check the directory of named segments; its size does not limit memfds."""
    name = os.environ.get("SHMREDUCE_DIRECTORY") or "/dev/shm"  # noqa: S108 - only looked at
    try:
        # With a slash at the end, statvfs() fails with ENOTDIR for a regular file.
        status = os.statvfs(f"{machine.path(name)}/")
    except OSError as error:
        return Finding(
            "directory of named segments",
            "warning",
            f"{name}: {error.strerror}",
            "mount a tmpfs there, or set SHMREDUCE_DIRECTORY; only the file_system strategy "
            "needs it",
        )
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    value = f"{name}: {size_text(free)} free of {size_text(size)}"
    if free > _SMALL_DIRECTORY:
        return Finding("directory of named segments", "ok", value)
    return Finding(
        "directory of named segments",
        "warning",
        value,
        "use the file_descriptor strategy, which needs no room there, or make it larger: "
        "`docker run --shm-size=2g`, an emptyDir volume with medium Memory in Kubernetes, "
        f"`mount -o remount,size=50% {name}` elsewhere",
    )


def available_memory(machine: Machine) -> Finding:
    """Check MemAvailable, which limits all shared memory of the machine."""
    available, total = machine.memory("MemAvailable", "MemTotal")
    if available is None or total is None:
        return Finding("available memory", "ok", "not told by this system")
    value = f"{size_text(available)} of {size_text(total)}"
    if available >= _LITTLE_MEMORY:
        return Finding("available memory", "ok", value)
    return Finding(
        "available memory",
        "warning",
        value,
        "end other programs, or bound what shmreduce takes: SHMREDUCE_BUDGET=256M",
    )


def cgroup_memory(machine: Machine) -> Finding:
    """Check the memory limits of the cgroup and those above it, which include shared memory."""
    limits = sorted(cgroup_limits(machine))
    if not limits:
        return Finding("cgroup memory limit", "ok", "none")
    headroom, limit, folder = limits[0]
    value = f"{size_text(limit)} in {folder}, {size_text(headroom)} left"
    if headroom >= _LITTLE_MEMORY:
        return Finding("cgroup memory limit", "ok", value)
    return Finding(
        "cgroup memory limit",
        "warning",
        value,
        "raise it (`docker run --memory`, resources.limits.memory, MemoryMax=), or bound what "
        "shmreduce takes: SHMREDUCE_BUDGET=256M",
    )


def address_space(machine: Machine) -> Finding:
    """Check RLIMIT_AS: segments are mapped as a whole, used or not."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return Finding("address space", "ok", "unlimited")
    total = machine.memory("MemTotal")[0] or 0
    if soft >= 2 * total:
        return Finding("address space", "ok", size_text(soft))
    return Finding(
        "address space",
        "warning",
        f"{size_text(soft)}, the machine has {size_text(total)} of memory",
        "lift it with `ulimit -v unlimited`, and limit memory by a cgroup instead",
    )


def overcommit(machine: Machine) -> Finding:
    """Check vm.overcommit_memory: mode 2 refuses private mappings of large blocks."""
    mode = machine.number("/proc/sys/vm/overcommit_memory")
    if mode != 2:
        return Finding("overcommit", "ok", "not strict")
    return Finding(
        "overcommit",
        "warning",
        "strict (vm.overcommit_memory=2): mapping may fail although memory is free",
        "raise vm.overcommit_ratio, or `sysctl -w vm.overcommit_memory=0`",
    )


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
