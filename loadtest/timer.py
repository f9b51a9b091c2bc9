"""A timer of the event loop that is exact to microseconds.

An event loop's own timers wait in whole milliseconds, which would send every request up to one too late. Linux has a
file descriptor that becomes readable at a set time; elsewhere the last millisecond is waited for in turns of the loop.
"""

import asyncio
import ctypes
import ctypes.util
import os
import sys
import time
from collections.abc import Callable
from typing import Final, Protocol, final

_CLOCK_MONOTONIC: Final = 1
_ABSOLUTE: Final = 1
_COARSE_S: Final = 0.002


class Timer(Protocol):
    """Calls back at a set time."""

    def set(self, due_s: float) -> None:
        """At this time of the monotonic clock, once. Sets anew what was set before."""

    def close(self) -> None:
        """Never calls back again."""


def timer(ring: Callable[[], None]) -> Timer:
    """The best there is on this system, for the running event loop."""
    return _FileTimer(ring) if sys.platform == "linux" else _TurningTimer(ring)


class _Times(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


@final
class _FileTimer:
    # Python has os.timerfd_create from 3.13 on only.
    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
        self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        asyncio.get_running_loop().add_reader(self._file, self._due)

    def set(self, due_s: float) -> None:
        whole, part = divmod(max(due_s, 0.0), 1.0)
        times = _Times(0, 0, int(whole), max(1, int(part * 1e9)))
        self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(times), None)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._file)
        os.close(self._file)

    def _due(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # set anew since
            return
        self._ring()


@final
class _TurningTimer:
    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.Handle | None = None

    def set(self, due_s: float) -> None:
        self.close()
        self._handle = self._loop.call_later(due_s - time.monotonic() - _COARSE_S, self._turn, due_s)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _turn(self, due_s: float) -> None:
        if time.monotonic() >= due_s:
            self._handle = None
            self._ring()
        else:
            self._handle = self._loop.call_soon(self._turn, due_s)
