"""Memory of the host that a GPU reads and writes by itself.

From memory that may be paged out, a driver copies piece by piece through a small buffer of its own, on a CPU.
"""

import ctypes
import math
import threading
import weakref
from collections import defaultdict, deque
from typing import Any, Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from service.engine import Floats

_CUDART: Final = "libcudart.so.13"
# Pages in use at once; they are lost to everything else on the machine.
_MOST_BYTES: Final = 256 * 1024 * 1024
_LEAST_BLOCK: Final = 4096


class PageLocked(Protocol):
    """Where pinned memory comes from."""

    def allocate(self, size: int) -> int | None:
        """The address of so many bytes, or None where there are none left."""

    def free(self, address: int) -> None:
        """Takes them back."""


@final
class CudaHost:
    """Pinned memory of the CUDA runtime, which onnxruntime has loaded by then."""

    def __init__(self) -> None:
        self._cudart = ctypes.CDLL(_CUDART)
        self._cudart.cudaFreeHost.argtypes = [ctypes.c_void_p]

    def allocate(self, size: int) -> int | None:
        """The address of so many bytes, or None where there are none left."""
        address = ctypes.c_void_p()
        status = self._cudart.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(0))
        if status:
            self._cudart.cudaGetLastError()  # it would be found by whoever asks next
            return None
        return address.value

    def free(self, address: int) -> None:
        """Takes them back."""
        self._cudart.cudaFreeHost(address)


@final
class PinnedMemory:
    """Arrays in pinned memory, each given back when nobody holds it any more; safe from several threads at once.

    To pin a page takes longer than to copy it, so blocks are kept for the next array of about their size. Beyond
    `most_bytes` arrays are ordinary ones.
    """

    def __init__(self, source: PageLocked, most_bytes: int = _MOST_BYTES) -> None:
        self._source = source
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._pinned_bytes = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        # Arrays end wherever the interpreter finds that they have, also in the middle of what is locked here.
        self._ended: deque[tuple[int, int]] = deque()

    @property
    def pinned_bytes(self) -> int:
        """How much is pinned, in use or kept."""
        return self._pinned_bytes

    def empty(self, shape: tuple[int, ...]) -> Floats:
        """An array of float32 with anything in it."""
        count = math.prod(shape)
        size = max(_LEAST_BLOCK, 1 << (4 * count - 1).bit_length())
        address = self._take(size)
        if address is None:
            return np.empty(shape, np.float32)
        owner = (ctypes.c_char * size).from_address(address)
        weakref.finalize(owner, self._end, size, address).atexit = False
        return np.frombuffer(memoryview(owner).cast("B"), np.float32, count).reshape(shape)

    def copy(self, array: NDArray[Any]) -> Floats:
        """A float32 array's copy, C-contiguous."""
        pinned = self.empty(array.shape)
        np.copyto(pinned, array)
        return pinned

    def _end(self, size: int, address: int) -> None:
        self._ended.append((size, address))

    def _take(self, size: int) -> int | None:
        with self._lock:
            while self._ended:
                ended_size, ended = self._ended.popleft()
                self._free[ended_size].append(ended)
            if self._free[size]:
                return self._free[size].pop()
            if self._pinned_bytes + size > self._most_bytes:
                self._give_up_free(size)
            if self._pinned_bytes + size > self._most_bytes:
                return None
            address = self._source.allocate(size)
            if address is not None:
                self._pinned_bytes += size
            return address

    def _give_up_free(self, wanted: int) -> None:
        """Frees what is kept, the largest first, until so much may be pinned."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self._pinned_bytes + wanted > self._most_bytes:
                self._source.free(self._free[size].pop())
                self._pinned_bytes -= size
