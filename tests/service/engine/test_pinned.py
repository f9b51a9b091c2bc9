"""Arrays in pinned memory: whose it is, when it is free again, and that it ends somewhere."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from service.engine.pinned import PinnedMemory
from tests.service.engine.ordinary import Ordinary

KIB = 1024


class TestArrays:
    def test_have_a_shape_and_their_own_memory(self) -> None:
        """Two arrays that are held at once share nothing, and each lies in a block of the source."""
        source = Ordinary()
        memory = PinnedMemory(source)
        one, other = memory.empty((3, 5)), memory.empty((3, 5))
        one[...], other[...] = 1, 2
        assert one.shape == other.shape == (3, 5)
        assert (one == 1).all()
        assert (other == 2).all()
        assert {one.ctypes.data, other.ctypes.data} == set(source.blocks)

    def test_of_no_elements(self) -> None:
        """An axis of 0 is a shape like any other."""
        assert PinnedMemory(Ordinary()).empty((2, 0, 5)).shape == (2, 0, 5)

    def test_copy_is_contiguous(self) -> None:
        """A copy of a transposed view holds the same numbers in order."""
        tensor = np.arange(12, dtype=np.float32).reshape(3, 4).T
        copied = PinnedMemory(Ordinary()).copy(tensor)
        assert copied.flags.c_contiguous
        np.testing.assert_array_equal(copied, tensor)


class TestReuse:
    def test_is_used_again_when_nobody_holds_it(self) -> None:
        """A thousand arrays, one after the other, take one block."""
        source = Ordinary()
        memory = PinnedMemory(source)
        for _ in range(1000):
            memory.empty((100, 7))
        assert len(source.blocks) == 1

    def test_view_holds_it(self) -> None:
        """While part of an array is held, nobody else gets its memory."""
        memory = PinnedMemory(Ordinary())
        view = memory.empty((10, 100))[3]
        view[...] = 7
        memory.empty((10, 100))[...] = 0
        assert (view == 7).all()

    def test_array_that_ends_while_another_is_taken(self) -> None:
        """Garbage that is collected in the middle of it neither blocks nor is lost."""
        source = Ordinary()
        memory = PinnedMemory(source)
        ring: list[object] = []
        thresholds = gc.get_threshold()
        gc.set_threshold(1)
        try:
            for _ in range(100):
                ring = [memory.empty((10, 100)), ring]
                ring.append(ring)
                if len(ring) > 2:
                    ring = []
        finally:
            gc.set_threshold(*thresholds)
        gc.collect()
        assert len(source.blocks) < 100

    def test_from_several_threads(self) -> None:
        """No two threads ever hold the same memory."""
        memory = PinnedMemory(Ordinary())

        def write_and_read(number: int) -> bool:
            array = memory.empty((64, 64))
            array[...] = number
            return bool((array == number).all())

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(write_and_read, range(2000)))


class TestBound:
    def test_beyond_it_arrays_are_ordinary(self) -> None:
        """What does not fit is allocated as numpy does, and what is pinned stays within the bound."""
        source = Ordinary()
        memory = PinnedMemory(source, most_bytes=64 * KIB)
        held = [memory.empty((4 * KIB,)) for _ in range(10)]  # of 16 KiB each
        assert source.bytes == memory.pinned_bytes == 64 * KIB
        assert sum(array.ctypes.data in source.blocks for array in held) == 4

    def test_what_is_kept_makes_room_for_another_size(self) -> None:
        """Blocks that nobody uses are given up for one that is wanted, the largest first."""
        source = Ordinary()
        memory = PinnedMemory(source, most_bytes=64 * KIB)
        del [memory.empty((2 * KIB,)), memory.empty((4 * KIB,)), memory.empty((8 * KIB,))][:]
        assert source.bytes == 56 * KIB
        large = memory.empty((6 * KIB,))
        assert large.ctypes.data in source.blocks
        assert source.freed == []
        other = memory.empty((8 * KIB,))
        assert other.ctypes.data in source.blocks
        assert source.freed == [16 * KIB, 8 * KIB]
        assert source.bytes <= 64 * KIB

    def test_source_that_has_none_left(self) -> None:
        """A machine that pins nothing more is no failure."""
        memory = PinnedMemory(Ordinary(most=0))
        array = memory.empty((3, 3))
        array[...] = 1
        assert memory.pinned_bytes == 0
