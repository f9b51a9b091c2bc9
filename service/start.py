"""Puts a server together from its settings: the one place that knows every part."""

from service.artifact import Artifact
from service.codec import Codec
from service.codec.json import JsonCodec
from service.codec.npz import NpzCodec
from service.codec.safetensors import SafetensorsCodec
from service.cpus import usable_cpus
from service.engine import Engine
from service.engine.device import Device, check_wheels, choose_device, is_installed, missing_for_cuda
from service.http.access import ApiKeys
from service.http.app import create_app
from service.http.server import bind, serve
from service.http.state import ServerState
from service.library import EngineFactory, Library
from service.log import configure_logging
from service.metrics import Metrics
from service.repository import Repository
from service.scheduler import Scheduler
from service.settings import Settings


def start(settings: Settings, make_engine: EngineFactory | None = None) -> bool:
    """Serves until told to stop; returns whether it ended as it should.

    Args:
        settings: effective.
        make_engine: the engine of an artefact; None means ONNX Runtime.

    Raises:
        StartupError: something that can be known before listening is wrong.
    """
    configure_logging(settings.log_level, settings.log_format)
    check_wheels(is_installed)
    device = choose_device(settings.device, missing_for_cuda)
    repository = Repository(settings.models)
    artifacts = repository.read_all()
    library = Library(repository, make_engine or _onnx_engines(device, settings))
    state = server_state(settings, device, library)
    sock = bind(settings.host, settings.port)
    return serve(state, sock, lambda give_up: create_app(state, lambda: library.start(artifacts), give_up))


def server_state(settings: Settings, device: Device, library: Library) -> ServerState:
    """The parts that routes share, before any model is loaded.

    Raises:
        StartupError: the file of API keys cannot be read.
    """
    metrics = Metrics()
    workers = settings.workers or usable_cpus()
    metrics.workers.set(workers)
    return ServerState(
        settings=settings,
        device=device,
        codecs=codecs(settings),
        metrics=metrics,
        scheduler=Scheduler(workers, settings.max_queue, settings.workspace_bytes, metrics),
        api_keys=None if settings.api_keys_file is None else ApiKeys.read(settings.api_keys_file),
        library=library,
    )


def codecs(settings: Settings) -> dict[str, Codec]:
    """Every codec, by media type."""
    every: tuple[Codec, ...] = (JsonCodec(), SafetensorsCodec(), NpzCodec(settings.max_body_bytes))
    return {codec.media_type: codec for codec in every}


def _onnx_engines(device: Device, settings: Settings) -> EngineFactory:
    def make(artifact: Artifact) -> Engine:
        from service.engine.onnx import OnnxEngine  # noqa: PLC0415  # costs 0.2 s that health need not wait for

        # 0 means: one thread a call while calls run side by side, every CPU for a call that runs alone.
        threads = settings.threads_per_call or 1
        return OnnxEngine(artifact, device.name, threads, settings.threads_per_call or usable_cpus())

    return make
