"""Checks of the kernel, the container and Python.

May import ``findings``, ``interpreter``, and ``headroom`` and ``locks`` of the memory.
"""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shmreduce.cli.doctor.findings import Finding
from shmreduce.interpreter import is_free_threaded
from shmreduce.memory import locks

if TYPE_CHECKING:
    from shmreduce.memory.headroom import Machine

__all__ = [
    "anonymous_files",
    "byte_locks",
    "container",
    "kernel",
    "other_processes",
    "process_files",
    "python",
    "user_namespace",
]

# The number of the initial PID namespace (include/linux/proc_ns.h, PROC_PID_INIT_INO).
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
_WHOLE_USER_RANGE = "4294967295"


def kernel(_machine: Machine) -> Finding:
    """Check the operating system."""
    value = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform == "linux":
        return Finding("kernel", "ok", value)
    return Finding(
        "kernel",
        "warning",
        value,
        "shmreduce is tested on Linux only; see 'What is supported' in docs/index.md",
    )


def python(_machine: Machine) -> Finding:
    """Check the interpreter, and whether it has a global interpreter lock."""
    value = f"{platform.python_implementation()} {platform.python_version()}"
    if is_free_threaded():
        return Finding(
            "Python",
            "problem",
            f"{value}, free-threaded",
            "use a build with the global interpreter lock: shmreduce is not made for this one",
        )
    return Finding("Python", "ok", f"{value}, with the global interpreter lock")


def anonymous_files(_machine: Machine) -> Finding:
    """Make and seal a memfd, which the file_descriptor strategy needs."""
    if not hasattr(os, "memfd_create"):
        return _no_memfd("this Python has no os.memfd_create")
    try:
        fd = os.memfd_create("shmreduce-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return _no_memfd(f"memfd_create failed: {error.strerror}")
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        return _no_memfd(f"sealing failed: {error.strerror}")
    finally:
        os.close(fd)
    return Finding("anonymous files (memfd)", "ok", "can be made and sealed")


def byte_locks(_machine: Machine) -> Finding:
    """Take a lock of an open file description, and check that another one sees it."""
    name = "byte locks (F_OFD_SETLK)"
    remedy = "every strategy needs them: use 64-bit Linux, and allow fcntl in the seccomp profile"
    if not locks.supported():
        return Finding(name, "problem", "missing on this platform", remedy)
    try:
        first = os.memfd_create("shmreduce-doctor", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as error:
        return Finding(name, "ok", f"known to Python, not tried: {error}")
    try:
        second = os.open(f"/proc/self/fd/{first}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        os.close(first)
        return Finding(name, "ok", f"known to Python, not tried: {error}")
    try:
        works = locks.try_lock(first, 0) and locks.first_locked(second, 0) == 0
    except OSError as error:
        return Finding(name, "problem", f"a trial failed: {error}", remedy)
    finally:
        os.close(first)
        os.close(second)
    if works:
        return Finding(name, "ok", "work between two openings of one file")
    return Finding(name, "problem", "a lock was not seen through another opening", remedy)


def process_files(machine: Machine) -> Finding:
    """Check /proc and its hidepid option (proc(5))."""
    name = "/proc"
    if not machine.path("/proc/self/fd").is_dir():
        return Finding(
            name,
            "warning",
            "/proc/self/fd is missing",
            "mount it: `mount -t proc proc /proc`; every strategy opens segments through it",
        )
    for line in (machine.text("/proc/mounts") or "").splitlines():
        _device, folder, kind, options, *_ = line.split()
        if (folder, kind) == ("/proc", "proc"):
            hidden = [each for each in options.split(",") if each.startswith("hidepid=")]
            if hidden and hidden[0] not in ("hidepid=0", "hidepid=off"):
                return Finding(
                    name,
                    "ok",
                    f"mounted with {hidden[0]}: processes of other users are not listed by "
                    "`shmreduce ls`",
                )
    return Finding(name, "ok", "mounted, shows all processes")


def other_processes(machine: Machine) -> Finding:
    """Open a file of a child process through /proc/PID/fd, as readers of segments do.

    That needs ptrace's read access (ptrace(2), PTRACE_MODE_READ_FSCREDS): both processes run
    as the same user, and the child is dumpable. Yama's ptrace_scope does not matter, since it
    only restricts attaching.
    """
    name = "files of other processes"
    scope = machine.number("/proc/sys/kernel/yama/ptrace_scope")
    note = "" if scope is None else f" (yama ptrace_scope={scope}, which does not matter here)"
    if not machine.path("/proc/self/fd").is_dir():
        return Finding(name, "warning", "not tried without /proc", "mount /proc")
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        try:
            os.close(os.open(f"/proc/{child.pid}/fd/1", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return Finding(
                name,
                "problem",
                f"/proc/PID/fd of a child cannot be opened: {error.strerror}{note}",
                "run all processes as one user in one pid namespace, do not clear their "
                "dumpable flag (prctl PR_SET_DUMPABLE), allow ptrace reads in the security "
                "profile; or use the file_system strategy",
            )
    finally:
        child.communicate(b"\n")
    return Finding(name, "ok", f"can be opened through /proc/PID/fd{note}")


def container(machine: Machine) -> Finding:
    """Look for signs of a container; only processes in the same one can share memory."""
    signs = [
        name
        for name in ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")
        if machine.path(name).exists()
    ]
    if os.environ.get("container"):  # noqa: SIM112 - systemd's name for it is lower case
        signs.append("$container")
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        signs.append("$KUBERNETES_SERVICE_HOST")
    if any(
        word in (machine.text("/proc/1/cgroup") or "")
        for word in ("docker", "kubepods", "containerd", "libpod", "lxc")
    ):
        signs.append("/proc/1/cgroup")
    if _root_file_system(machine) == "overlay":
        signs.append("overlay root")
    if _link(machine, "/proc/self/ns/pid") not in (None, _FIRST_PID_NAMESPACE):
        signs.append("pid namespace")
    value = f"yes: {', '.join(signs)}" if signs else "no signs of one"
    return Finding("container", "ok", value)


def user_namespace(machine: Machine) -> Finding:
    """Check the user namespace: processes of different ones cannot open each other's segments."""
    mapped = (machine.text("/proc/self/uid_map") or "").split()
    if not mapped or mapped == ["0", "0", _WHOLE_USER_RANGE]:
        return Finding("user namespace", "ok", "the first one")
    return Finding(
        "user namespace",
        "ok",
        "one of its own: processes outside it cannot open its segments, nor the other way round",
    )


def _no_memfd(reason: str) -> Finding:
    return Finding(
        "anonymous files (memfd)",
        "warning",
        reason,
        "allow memfd_create in the seccomp profile, take a Python that has it, or use the "
        "file_system strategy",
    )


def _root_file_system(machine: Machine) -> str | None:
    """Return the type of the file system at ``/`` (proc_pid_mountinfo(5))."""
    for line in (machine.text("/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[4] == "/":
            return after.split()[0]
    return None


def _link(machine: Machine, name: str) -> str | None:
    try:
        return str(Path(machine.path(name)).readlink())
    except OSError:
        return None
