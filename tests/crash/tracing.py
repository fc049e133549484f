"""Follows a child from system call to system call, with ptrace. Linux only."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path

TRACEME, SYSCALL, SETOPTIONS, GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
TRACESYSGOOD, EXITKILL = 0x1, 0x100000
SYSCALL_STOP = signal.SIGTRAP | 0x80
ENTRY = 1

CALLS = {
    "x86_64": {1: "write", 18: "write", 74: "sync", 75: "sync"},
    "aarch64": {64: "write", 68: "write", 82: "sync", 83: "sync"},
}
"""The numbers of write and pwrite64, fsync and fdatasync."""


class Info(ctypes.Structure):
    """The kernel's ``ptrace_syscall_info`` as it is at the entry to a call."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
    )


def ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    """The system call itself."""
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    call.restype = ctypes.c_long
    return int(call(request, pid, address, data))


def can_trace() -> bool:
    """Whether this machine lets a process trace its child."""
    if sys.platform != "linux":
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(0 if ptrace(TRACEME, 0) == 0 else 1)
    return os.waitpid(pid, 0)[1] == 0


def be_traced() -> None:
    """In the child: wait for the parent to follow."""
    ptrace(TRACEME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)


def follow(pid: int, stopped: Callable[[int], bool]) -> tuple[int, int]:
    """Let a child run from stop to stop of its main thread, and kill it when ``stopped`` of the count so far says so.

    Gives its wait status and the number of stops.
    """
    _, status = os.waitpid(pid, 0)
    ptrace(SETOPTIONS, pid, 0, TRACESYSGOOD | EXITKILL)
    stops = passed_on = 0
    while os.WIFSTOPPED(status):
        ptrace(SYSCALL, pid, 0, passed_on)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            break
        passed_on = 0 if os.WSTOPSIG(status) == SYSCALL_STOP else os.WSTOPSIG(status)
        if passed_on == 0:
            stops += 1
            if stopped(stops):
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
    return status, stops


def entered(pid: int) -> tuple[str, str] | None:
    """Which file a stopped child is about to write or sync; None if it is about to do neither."""
    info = Info()
    ptrace(GET_SYSCALL_INFO, pid, ctypes.sizeof(info), ctypes.addressof(info))
    name = CALLS.get(platform.machine(), {}).get(info.number) if info.op == ENTRY else None
    if name is None:
        return None
    return name, Path(f"/proc/{pid}/fd/{info.arguments[0]}").readlink().name
