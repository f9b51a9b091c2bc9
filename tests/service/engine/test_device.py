"""Which device computes and why, with what the machine has played by functions, and once for real."""

import ctypes
from collections.abc import Callable, Collection
from typing import Literal, NoReturn

import pytest

from service.engine import device
from service.engine.device import Device, check_wheels, choose_device, is_installed, missing_for_cuda
from service.errors import StartupError

MISSING = [
    pytest.param("the onnxruntime wheel is the CPU one (wheel: ...)", id="wheel"),
    pytest.param("libcuda.so.1 is not there (driver: ...)", id="driver"),
    pytest.param("the driver sees no GPU (driver: ...)", id="gpu"),
    pytest.param("libcublas.so.13 cannot be loaded (library: ...)", id="library"),
]


def never() -> NoReturn:
    """Fails the test that asks."""
    raise AssertionError("nobody needs to know what CUDA lacks")


class TestChoice:
    def test_cpu_asks_nothing(self) -> None:
        """Asked for the CPU, nothing of CUDA is looked at."""
        assert choose_device("cpu", never) == Device("cpu", "asked for")

    @pytest.mark.parametrize(
        ("requested", "reason"),
        [pytest.param("cuda", "asked for", id="cuda"), pytest.param("auto", "CUDA is complete", id="auto")],
    )
    def test_cuda_where_it_is_complete(self, requested: Literal["auto", "cuda"], reason: str) -> None:
        """With nothing missing, cuda and auto both compute on CUDA."""
        assert choose_device(requested, lambda: None) == Device("cuda", reason)

    @pytest.mark.parametrize("missing", MISSING)
    def test_cuda_that_is_not_complete_stops_the_start(self, missing: str) -> None:
        """Asked for CUDA, whatever is missing is named, and the CPU is never taken instead."""
        with pytest.raises(StartupError) as caught:
            choose_device("cuda", lambda: missing)
        assert str(caught.value) == f"device: cuda was asked for, but {missing}"

    @pytest.mark.parametrize("missing", MISSING)
    def test_auto_says_why_it_takes_the_cpu(self, missing: str) -> None:
        """With auto, the CPU is taken where something is missing, and the reason says what."""
        assert choose_device("auto", lambda: missing) == Device("cpu", f"no CUDA: {missing}")


class FakeDriver:
    """libcuda.so.1, as far as it is called."""

    def __init__(self, init_status: int = 0, devices: int = 1) -> None:
        self._init_status = init_status
        self._devices = devices

    def cuInit(self, flags: int) -> int:  # noqa: N802  # the driver's name
        """A CUDA status."""
        assert flags == 0
        return self._init_status

    def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802
        """Success, and the number of devices."""
        count._obj.value = self._devices  # type: ignore[attr-defined]  # what ctypes.byref points to
        return 0


def loader(driver: FakeDriver | None, without: Collection[str] = ()) -> Callable[[str], object]:
    """A `ctypes.CDLL` that finds this driver, and every library but some."""

    def load(library: str) -> object:
        if library in without or (library == "libcuda.so.1" and driver is None):
            raise OSError(f"{library}: cannot open shared object file")
        return driver

    return load


class TestMissingForCuda:
    @pytest.mark.parametrize(
        ("load", "want"),
        [
            pytest.param(loader(None), "libcuda.so.1 is not there (driver: ", id="no_driver"),
            pytest.param(
                loader(FakeDriver(init_status=803)), "the driver answers with CUDA error 803 (driver: ", id="old_driver"
            ),
            pytest.param(loader(FakeDriver(devices=0)), "the driver sees no GPU (driver: ", id="no_gpu"),
            pytest.param(
                loader(FakeDriver(), {"libcublasLt.so.13"}),
                "libcublasLt.so.13 cannot be loaded (library: ",
                id="no_library",
            ),
        ],
    )
    def test_names_the_first(self, monkeypatch: pytest.MonkeyPatch, load: Callable[[str], object], want: str) -> None:
        """With the GPU wheel, what is missing is the driver, the device or a library, and says how to get it."""
        monkeypatch.setattr(device, "_missing_wheel", lambda: None)
        monkeypatch.setattr(ctypes, "CDLL", load)
        missing = missing_for_cuda()
        assert missing is not None
        assert missing.startswith(want)

    def test_is_nothing_where_all_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wheel, driver, device and libraries make CUDA complete."""
        monkeypatch.setattr(device, "_missing_wheel", lambda: None)
        monkeypatch.setattr(ctypes, "CDLL", loader(FakeDriver()))
        assert missing_for_cuda() is None

    @pytest.mark.skipif(is_installed("onnxruntime-gpu"), reason="the wheel here is the GPU one")
    def test_of_the_cpu_wheel_is_the_wheel(self) -> None:
        """With the CPU wheel, that is what is missing, whatever else is there."""
        assert missing_for_cuda() == (
            "the onnxruntime wheel is the CPU one (wheel: pip install 'mha-service[gpu]' in its place)"
        )


class TestWheels:
    @pytest.mark.parametrize("wheel", ["onnxruntime", "onnxruntime-gpu"])
    def test_one_is_right(self, wheel: str) -> None:
        """Either wheel alone is fine."""
        check_wheels(lambda name: name == wheel)

    def test_none_says_what_to_install(self) -> None:
        """Without a wheel the start is refused, with both extras named."""
        with pytest.raises(StartupError, match=r"onnxruntime is not installed: .*\[cpu\].*\[gpu\]"):
            check_wheels(lambda _: False)

    def test_both_are_refused(self) -> None:
        """With both wheels nobody knows which one is imported: the start is refused, with what to uninstall."""
        with pytest.raises(StartupError, match=r"both onnxruntime and onnxruntime-gpu .*pip uninstall"):
            check_wheels(lambda _: True)

    def test_here(self) -> None:
        """This environment has exactly one of them."""
        check_wheels(is_installed)
        assert not is_installed("no-such-distribution")
