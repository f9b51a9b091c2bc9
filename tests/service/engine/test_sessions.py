"""Graphs that compute where they were told to, or not at all."""

from pathlib import Path

import onnxruntime as ort
import pytest

from service.engine.sessions import CPU, Provider, Sessions, cuda
from service.errors import StartupError
from service.repository import Repository


class TestDevice:
    @pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this wheel has CUDA")
    @pytest.mark.filterwarnings("ignore:Specified provider 'CUDAExecutionProvider'")
    def test_cuda_that_is_not_there_is_never_the_cpu(self, repository: Path) -> None:
        """Asked for CUDA where there is none, the load fails; the runtime's silent fallback does not get through."""
        sessions = Sessions(Repository(repository).read("odd", 1), cuda(tf32=False))
        with pytest.raises(StartupError, match=r"^odd/1: onnxruntime would compute on CPUExecutionProvider, not CUDA"):
            sessions.graph("masked", 1)

    @pytest.mark.parametrize("name", ["masked", "full", "attend"])
    def test_operators_that_the_cpu_would_compute_are_refused(self, repository: Path, name: str) -> None:
        """A provider that takes the graph but none of its operators is found out; Azure's is one, in every wheel."""
        sessions = Sessions(Repository(repository).read("odd", 1), Provider("AzureExecutionProvider", "cpu"))
        with pytest.raises(StartupError, match=rf"^odd/1: Azure\w+ has no .*MatMul.*, which the graph '{name}' needs$"):
            sessions.graph(name, 1)

    def test_tf32_is_what_was_asked(self) -> None:
        """The option says 0 unless TF32 was asked for."""
        assert cuda(tf32=False).options["use_tf32"] == "0"
        assert cuda(tf32=True).options["use_tf32"] == "1"


class TestSessions:
    def test_graph_is_loaded_once_until_it_is_forgotten(self, repository: Path) -> None:
        """The same session for a name and a number of threads; another one after it was forgotten."""
        sessions = Sessions(Repository(repository).read("odd", 1), CPU)
        first = sessions.graph("full", 1)
        assert sessions.graph("full", 1) is first
        assert sessions.graph("full", 2) is not first
        sessions.forget({"full"})
        assert sessions.graph("full", 1) is not first

    def test_only_wide_calls_spin(self, repository: Path) -> None:
        """Threads that wait for each other may spin from the number on that was said, and stop with the call."""
        sessions = Sessions(Repository(repository).read("odd", 1), CPU, spinning_from=2)

        def entry(threads: int, name: str) -> str:
            options = sessions.graph("full", threads).session.get_session_options()
            return str(options.get_session_config_entry(name))

        assert entry(1, "session.intra_op.allow_spinning") == "0"
        assert entry(2, "session.intra_op.allow_spinning") == "1"
        assert entry(2, "session.force_spinning_stop") == "1"

    @pytest.mark.parametrize(
        ("model", "name", "keeps"),
        [
            pytest.param("odd", "full", False, id="scores"),
            pytest.param("odd", "attend", True, id="tiles"),
            pytest.param("additive", "full", True, id="additive_scores"),
        ],
    )
    def test_memory_is_kept_where_calls_need_much(self, repository: Path, model: str, name: str, keeps: bool) -> None:
        """An arena is kept for what is as large as the workspace: tiles, and additive scoring's vectors."""
        session = Sessions(Repository(repository).read(model, 1), CPU).graph(name, 1).session
        assert session.get_session_options().enable_cpu_mem_arena is keeps
