"""schemathesis drives every route from the OpenAPI description: no crash, and no status that is not described."""

import subprocess
import sys
from pathlib import Path

from tests.served import serving

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_no_crash_and_no_surprise(tmp_path: Path, seeds_repository: Path) -> None:
    """Whatever fits the description, and much that does not, is answered as described."""
    with serving(tmp_path / "log", "--models", str(seeds_repository)) as server:
        # A process of its own: schemathesis' pytest plugin does not know pytest 9.2 yet.
        run = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
                *("--checks", CHECKS, "--max-examples", "25", "--seed", "1", "--no-color"),
            ],
            capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr
        assert server.process.poll() is None
