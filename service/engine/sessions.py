"""ONNX Runtime sessions on an artefact's graphs, and the proof that they compute where they were told to."""

import threading
from dataclasses import dataclass, field
from typing import Any, Final, final

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from service.artifact import Artifact
from service.engine.device import DeviceName
from service.errors import ArtifactError

# The runtime's exceptions share no base class below Exception.
REFUSALS: Final = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
    RuntimeError,
)
_OF_TILES: Final = ("attend", "attend_full")
# Threads that wait in the middle of a call look for work for so long before they sleep. To be woken takes 50, and a
# layer hands work over six times; the call has its CPUs to itself.
_SPIN_US: Final = 200
# The runtime keeps arithmetic on shapes on the CPU, by intent: a few integers that a GPU would have to hand back.
_OF_SHAPES: Final = frozenset({"Concat", "Mul", "Reshape", "Shape", "Squeeze", "Unsqueeze"})


@final
@dataclass(frozen=True, slots=True)
class Provider:
    """What the runtime computes with: its name for it, its options, and its name for the memory there."""

    name: str
    memory: DeviceName
    options: dict[str, str] = field(default_factory=dict)


CPU: Final = Provider("CPUExecutionProvider", "cpu")


def cuda(*, tf32: bool) -> Provider:
    """The first GPU. With tf32 products of matrices are faster, and good to three decimal digits instead of seven."""
    # Sizes vary without end. An arena that grows by what is asked never stops growing then; one that grows by powers of
    # two soon has room for all of them, and less of it (docs/decisions/0011-cuda.md).
    options = {"use_tf32": "1" if tf32 else "0", "arena_extend_strategy": "kNextPowerOfTwo"}
    return Provider("CUDAExecutionProvider", "cuda", options)


@final
@dataclass(frozen=True, slots=True)
class Graph:
    """A graph that can be run, and the names of what it answers."""

    session: ort.InferenceSession
    outputs: list[str]


@final
class Sessions:
    """Graphs by name and number of threads, each loaded when it is first needed. Safe from several threads at once.

    Args:
        artifact: verified.
        provider: what to compute with.
        spinning_from: number of threads from which on they may spin while they wait for each other; 0 means never.
    """

    def __init__(self, artifact: Artifact, provider: Provider, spinning_from: int = 0) -> None:
        self._artifact = artifact
        self._provider = provider
        self._spinning_from = spinning_from
        self._loading = threading.Lock()
        self._loaded: dict[tuple[str, int], Graph] = {}

    def graph(self, name: str, threads: int) -> Graph:
        """The graph of that name.

        Raises:
            ArtifactError: the runtime refuses it, or would compute it elsewhere.
        """
        return self._loaded.get((name, threads)) or self._load(name, threads)

    def forget(self, names: set[str]) -> None:
        """Drops graphs, each of which holds the weights; they are loaded again when they are needed."""
        with self._loading:
            self._loaded = {key: graph for key, graph in self._loaded.items() if key[0] not in names}

    def _load(self, name: str, threads: int) -> Graph:
        with self._loading:
            if (name, threads) not in self._loaded:
                spins = 0 < self._spinning_from <= threads
                options = _options(self._provider, threads, spins=spins, keeps_memory=self._keeps_memory(name))
                session = _session(self._artifact, name, self._provider, options)
                self._loaded[name, threads] = Graph(session, [output.name for output in session.get_outputs()])
            return self._loaded[name, threads]

    def _keeps_memory(self, name: str) -> bool:
        # An arena keeps the most that any mix of shapes has needed, for each session; over 10,000 shapes there was no
        # end to that. But where what a call holds in between is large, pages fresh from the system cost more than what
        # is computed on them: tiles, as large as the workspace lets them be, took twice as long, and additive scores,
        # of which each is a vector, three times (docs/decisions/0009-small-calls.md, "Bounds").
        return name in _OF_TILES or self._artifact.layer.scoring == "additive"


def _session(artifact: Artifact, name: str, provider: Provider, options: ort.SessionOptions) -> ort.InferenceSession:
    where = f"{artifact.name}/{artifact.version}"
    try:
        session = ort.InferenceSession(artifact.graph(name), options, providers=[(provider.name, provider.options)])
    except REFUSALS as error:
        raise ArtifactError(f"{where}: onnxruntime refuses the graph {name!r}: {error}") from error
    if session.get_providers()[0] != provider.name:  # it falls back in silence
        raise ArtifactError(f"{where}: onnxruntime would compute on {session.get_providers()[0]}, not {provider.name}")
    elsewhere = _computed_elsewhere(session, provider) - _OF_SHAPES
    if elsewhere:
        raise ArtifactError(
            f"{where}: {provider.name} has no {', '.join(sorted(elsewhere))}, which the graph {name!r} needs"
        )
    return session


def _options(provider: Provider, threads: int, *, spins: bool, keeps_memory: bool) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads  # an explicit count also keeps the runtime from pinning threads to cores
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # A memory pattern is kept for every shape ever seen, and shapes vary without end (onnxruntime#11118).
    options.enable_mem_pattern = False
    options.enable_cpu_mem_arena = keeps_memory
    # Threads that spin while they wait take the cores that other calls could use.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
    if spins:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
        options.add_session_config_entry("session.force_spinning_stop", "1")  # at the end of the call
    if provider != CPU:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return options


def _computed_elsewhere(session: ort.InferenceSession, provider: Provider) -> set[str]:
    """The operators that another provider got."""
    if provider == CPU:
        return set()
    graphs: list[Any] = session.get_provider_graph_assignment_info()
    return {node.op_type for graph in graphs if graph.ep_name != provider.name for node in graph.get_nodes()}
