"""What one process finds out, others know."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from service.processes.notebook import Notebook


def forked(work: Callable[[], None]) -> int:
    """A process that does that; its id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def test_only_one_process_finds_out(tmp_path: Path) -> None:
    """Four at once: one measures, all know its value, infinity included."""
    notebook = Notebook()

    def find_out() -> dict[str, object]:
        with (tmp_path / "found").open("a") as found:
            found.write("x")
        time.sleep(0.1)
        return {"by": os.getpid(), "never": float("inf")}

    def work() -> None:
        value = notebook.recall("cost", find_out)
        (tmp_path / f"{os.getpid()}").write_text(f"{value['by']} {value['never']}")

    pids = [forked(work) for _ in range(4)]
    for pid in pids:
        os.waitpid(pid, 0)
    assert (tmp_path / "found").read_text() == "x"
    (said,) = {(tmp_path / f"{pid}").read_text() for pid in pids}
    assert said in [f"{pid} inf" for pid in pids]


def test_one_that_dies_does_not_keep_others_waiting(tmp_path: Path) -> None:
    notebook = Notebook()
    os.waitpid(forked(lambda: notebook.recall("cost", lambda: os._exit(1))), 0)
    assert notebook.recall("cost", lambda: 7) == 7
    assert notebook.recall("cost", lambda: 8) == 7
    assert notebook.recall("other", lambda: 9) == 9
