"""Which device computes, and why. CUDA that was asked for and is not there stops the start-up with what is missing.

ONNX Runtime itself falls back to the CPU in silence; nothing here or in `service.engine.onnx` lets it.
"""

import ctypes
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, final

from service.errors import StartupError

DeviceName = Literal["cpu", "cuda"]

# What libonnxruntime_providers_cuda.so of the CUDA 13 wheels (1.27 and later) needs, read with readelf. The last is
# opened only when it meets an attention operator in float32, which every artefact has.
_CUDA_LIBRARIES: Final = (
    "libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudnn.so.9",
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class Device:
    """The device chosen, and the sentence that says why."""

    name: DeviceName
    reason: str


def check_wheels(installed: Callable[[str], bool]) -> None:
    """Refuses a start without exactly one onnxruntime wheel: both install one folder, and the last wins.

    Raises:
        StartupError: none or both are installed.
    """
    found = [wheel for wheel in ("onnxruntime", "onnxruntime-gpu") if installed(wheel)]
    if not found:
        raise StartupError(
            "onnxruntime is not installed: pip install 'mha-service[cpu]', or 'mha-service[gpu]' for CUDA"
        )
    if len(found) == 2:
        raise StartupError(
            "both onnxruntime and onnxruntime-gpu are installed, and each overwrites the other: "
            "pip uninstall -y onnxruntime onnxruntime-gpu, then install one of mha-service[cpu] and mha-service[gpu]"
        )


def is_installed(distribution: str) -> bool:
    """Whether a distribution is installed in this environment."""
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def choose_device(requested: Literal["auto", "cpu", "cuda"], missing_for_cuda: Callable[[], str | None]) -> Device:
    """The device for a request.

    Args:
        requested: the setting.
        missing_for_cuda: says what CUDA lacks, or None; asked only where it matters.

    Raises:
        StartupError: cuda was asked for and something is missing.
    """
    if requested == "cpu":
        return Device("cpu", "asked for")
    missing = missing_for_cuda()
    if missing is None:
        return Device("cuda", "asked for" if requested == "cuda" else "CUDA is complete")
    if requested == "cuda":
        raise StartupError(f"device: cuda was asked for, but {missing}")
    return Device("cpu", f"no CUDA: {missing}")


def missing_for_cuda() -> str | None:
    """The first thing CUDA lacks here (wheel, driver, device or library), or None."""
    return _missing_wheel() or _missing_driver() or _missing_library()


def _missing_wheel() -> str | None:
    import onnxruntime as ort  # noqa: PLC0415  # costs 0.2 s, and `--device cpu` need not ask

    if "CUDAExecutionProvider" in ort.get_available_providers():
        ort.preload_dlls()
        return None
    return "the onnxruntime wheel is the CPU one (wheel: pip install 'mha-service[gpu]' in its place)"


def _missing_driver() -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 is not there (driver: install NVIDIA's, or start the container with --gpus all)"
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return f"the driver answers with CUDA error {status} (driver: see nvidia-smi)"
    return None if count.value else "the driver sees no GPU (driver: see nvidia-smi and CUDA_VISIBLE_DEVICES)"


def _missing_library() -> str | None:
    for library in _CUDA_LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError:
            return f"{library} cannot be loaded (library: pip install 'onnxruntime-gpu[cuda,cudnn]')"
    return None
