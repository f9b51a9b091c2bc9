"""Puts a server together from its settings: the one place that knows every part."""

import functools
import sys
import time
from typing import Final

from service.admission import Admission
from service.artifact import Artifact
from service.codec import Codec
from service.codec.json import JsonCodec
from service.codec.npz import NpzCodec
from service.codec.safetensors import SafetensorsCodec
from service.cpus import usable_cpus
from service.engine import Engine, Recall, find_out_anew
from service.engine.device import Device, check_wheels, choose_device, is_installed, missing_for_cuda
from service.engine.pinned import CudaHost, PinnedMemory
from service.errors import StartupError
from service.http.app import create_app
from service.http.secrets import Secrets
from service.http.server import bind, log_listening, serve
from service.http.state import ServerState
from service.library import EngineFactory, Library
from service.log import configure_logging
from service.metrics import Metrics
from service.processes.board import Seat
from service.processes.notebook import Notebook
from service.processes.parent import Parent
from service.repository import Repository
from service.scheduler import CALL_S, Scheduler
from service.settings import Settings
from service.slots import NoOthers, Slots
from service.traces import check_tracing, otlp_traces

# While the GPU computes for one, the other's tensors are put together and sent.
CUDA_WORKERS: Final = 2
# Each holds the weights once more, and four of them write and read for more CPUs than most machines have.
_MOST_PROCESSES: Final = 4


def start(settings: Settings, make_engine: EngineFactory | None = None) -> bool:
    """Serves until told to stop; returns whether it ended as it should.

    Args:
        settings: effective.
        make_engine: the engine of an artefact; None means ONNX Runtime.

    Raises:
        StartupError: something that can be known before listening is wrong.
    """
    configure_logging(settings.log_level, settings.log_format)
    check_installed(settings)
    device = choose_device(settings.device, missing_for_cuda)
    if device.name == "cuda" and settings.processes > 1:
        # Nor could CUDA be used on both sides of a fork.
        raise StartupError(f"processes: got {settings.processes}, want 1: one process, and one queue, serve a GPU")
    repository = Repository(settings.models)
    artifacts = repository.read_all()
    secrets = Secrets.read(settings)
    sock = bind(settings.host, settings.port)
    log_listening(sock, "http" if secrets.tls is None else "https")
    num_processes = settings.processes or _default_processes(device, _workers(settings, device))
    if num_processes == 1:
        library = Library(repository, make_engine or engines(device, settings, usable_cpus()))
        state = server_state(settings, device, library, secrets)
        return serve(state, sock, lambda give_up: create_app(state, lambda: library.start(artifacts), give_up))

    notebook = Notebook()

    def serve_at(seat: Seat) -> bool:
        library = Library(repository, make_engine or engines(device, settings, usable_cpus(), notebook.recall))
        state = server_state(settings, device, library, secrets, seat)

        def load() -> None:
            # What is stored may have changed since the process died that this one replaces.
            served = repository.read_all() if seat.replaces else artifacts
            library.start([artifact for artifact in served if artifact.name not in seat.unloaded])

        return serve(state, seat, lambda give_up: create_app(state, load, give_up))

    return Parent(sock, num_processes, serve_at, settings.drain_delay_s, settings.drain_timeout_s).run()


def check_installed(settings: Settings) -> None:
    """Makes sure that what the settings ask for can be imported.

    Raises:
        StartupError: both wheels of onnxruntime are there, or a distribution is missing.
    """
    check_wheels(is_installed)
    if settings.traces == "otlp":
        check_tracing(is_installed)


def server_state(
    settings: Settings, device: Device, library: Library, secrets: Secrets, seat: Seat | None = None
) -> ServerState:
    """The parts that the routes of one process share, before any model is loaded."""
    metrics = Metrics()
    total = _workers(settings, device)
    metrics.workers.set(total)
    num_processes = 1 if seat is None else seat.board.num_seats
    slots = Slots(total, max(1, total // num_processes), NoOthers() if seat is None else seat)
    admission = Admission(
        workers=slots.share,
        turn_s=CALL_S * total,  # a request has as many calls queued as there are workers
        most_wait_s=settings.max_queue_ms / 1000,
        most_bytes=settings.max_queue_bytes / num_processes,
        clock=time.perf_counter,
    )
    metrics.show(admission)
    return ServerState(
        settings=settings,
        device=device,
        codecs=codecs(settings),
        metrics=metrics,
        admission=admission,
        scheduler=Scheduler(slots, admission, settings.workspace_bytes, metrics),
        secrets=secrets,
        library=library,
        traces=otlp_traces() if settings.traces == "otlp" else None,
    )


def _workers(settings: Settings, device: Device) -> int:
    """Engine calls at once: with a GPU few, so that what waits is put together instead."""
    return settings.workers or (CUDA_WORKERS if device.name == "cuda" else usable_cpus())


def _default_processes(device: Device, workers: int) -> int:
    """One for each engine call that may run at once, up to a few: each has the weights in memory.

    A GPU wants every request in one queue.
    """
    if device.name == "cuda" or sys.platform != "linux":
        return 1
    return min(workers, _MOST_PROCESSES)


def codecs(settings: Settings) -> dict[str, Codec]:
    """Every codec, by media type."""
    every: tuple[Codec, ...] = (JsonCodec(), SafetensorsCodec(), NpzCodec(settings.max_body_bytes))
    return {codec.media_type: codec for codec in every}


def engines(device: Device, settings: Settings, cpus: int, recall: Recall = find_out_anew) -> EngineFactory:
    """Of the artefacts on a device. Imports the runtime late: it costs 0.2 s that health need not wait for.

    Args:
        device: where to compute.
        settings: effective.
        cpus: threads of a call that runs alone, where the settings leave that open.
        recall: what was found out before.
    """
    if device.name == "cuda":
        return _cuda_engines(settings, recall)

    def make(artifact: Artifact) -> Engine:
        from service.engine.cpu import CpuEngine  # noqa: PLC0415

        # 0 means: one thread a call while calls run side by side, every CPU for a call that runs alone.
        threads = settings.threads_per_call or 1
        return CpuEngine(artifact, threads, settings.threads_per_call or cpus, recall)

    return make


def _cuda_engines(settings: Settings, recall: Recall) -> EngineFactory:
    @functools.cache
    def memory() -> PinnedMemory:
        return PinnedMemory(CudaHost())

    def make(artifact: Artifact) -> Engine:
        from service.engine.cpu import CpuEngine  # noqa: PLC0415
        from service.engine.cuda import CudaEngine  # noqa: PLC0415
        from service.engine.sessions import cuda  # noqa: PLC0415

        reference = CpuEngine(artifact, 1, 1)
        return CudaEngine(artifact, cuda(tf32=settings.tf32 == "on"), memory(), reference, recall)

    return make
