"""Ordinary memory in the place of pinned memory, which only a machine with CUDA has."""

import ctypes


class Ordinary:
    """Counts what is taken and given back; `most` bytes at once, if given."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.blocks: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.freed: list[int] = []

    @property
    def bytes(self) -> int:
        """What is taken and not given back."""
        return sum(map(len, self.blocks.values()))

    def allocate(self, size: int) -> int | None:
        """The address of so many bytes, or None where there are none left."""
        if self._most is not None and self.bytes + size > self._most:
            return None
        block = ctypes.create_string_buffer(size)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        """Takes them back."""
        self.freed.append(len(self.blocks.pop(address)))
