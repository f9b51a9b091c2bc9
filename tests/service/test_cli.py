"""`mha serve` without serving, `mha inspect`, and what `mha` imports to say so."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mha import main
from service.settings import Settings, environment_name, flag_name
from tests.served import ServerProcess, clean_environment


def mha(*arguments: str | Path, **environment: str) -> Result:
    """The command in this process, with no other `MHA_*` than these."""
    inherited = dict.fromkeys((environment_name(setting) for setting in Settings.model_fields), None)
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env={**inherited, **environment})


def python(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Python in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(**environment), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


class TestHelp:
    def test_lists_every_command(self) -> None:
        """`mha --help` names each subcommand, with a word on what it does."""
        result = mha("--help")
        assert result.exit_code == 0
        assert re.findall(r"^  (\w+) +[A-Z].*\.$", result.output, re.MULTILINE) == [
            "export",
            "heads",
            "health",
            "inspect",
            "loadtest",
            "serve",
        ]

    @pytest.mark.parametrize("setting", list(Settings.model_fields))
    def test_of_serve_explains_every_setting(self, setting: str) -> None:
        """`mha serve --help` has a flag for each setting, with its description and its default."""
        words = " ".join(mha("serve", "--help").output.split())
        field = Settings.model_fields[setting]
        want = re.escape(f" {field.description}")
        if field.default is not None:
            want += re.escape(f" [default: {field.default}]")
        assert re.search(rf"{flag_name(setting)} \S+{want}", words)

    @pytest.mark.parametrize("command", [["--help"], ["serve", "--help"], ["inspect", "--help"]], ids=" ".join)
    def test_imports_nothing_heavy(self, command: list[str]) -> None:
        """Help comes without torch, onnxruntime, fastapi or numpy having been imported for it."""
        code = f"""
import sys
from mha import main
main({command!r}, standalone_mode=False)
heavy = {{"torch", "numpy", "onnx", "onnxruntime", "fastapi", "uvicorn", "export", "model"}}
print("imported:", sorted(heavy & set(sys.modules)))
"""
        done = python(code)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "imported: []"

    def test_version(self) -> None:
        """`mha --version` is the distribution's."""
        assert re.fullmatch(r"mha, version \d+\.\d+\.\d+\n", mha("--version").output)

    def test_unknown_command(self) -> None:
        """A command that is none ends with usage, status 2."""
        result = mha("serv")
        assert result.exit_code == 2
        assert "No such command 'serv'" in result.output


class TestMissingExtra:
    @pytest.mark.parametrize("package", ["torch", "rich"])
    def test_is_named(self, package: str) -> None:
        """Where a package that only export needs is not installed, `mha export` says which extra brings it."""
        done = python(f"import sys\nsys.modules[{package!r}] = None\nfrom mha import main\nmain(['export', '--help'])")
        assert done.returncode == 1
        assert done.stderr == (
            f"Error: 'mha export' needs {package}, which is not installed: pip install 'mha-service[export]'\n"
        )

    @pytest.mark.parametrize("package", ["hdrh", "rich", "safetensors"])
    def test_of_the_load_tester(self, package: str) -> None:
        """Its own extra is named, though `export` brings some of the same packages."""
        done = python(
            f"import sys\nsys.modules[{package!r}] = None\nfrom mha import main\nmain(['loadtest', '--help'])"
        )
        assert done.returncode == 1
        assert done.stderr.endswith(f"needs {package}, which is not installed: pip install 'mha-service[loadtest]'\n")

    @pytest.mark.parametrize(
        ("package", "flag", "extra"), [("onnx", "--artifact", "export"), ("plotly", "--html", "loadtest")], ids=str
    )
    def test_of_one_option(self, server: ServerProcess, tmp_path: Path, package: str, flag: str, extra: str) -> None:
        """A package that one option alone needs is asked for before anything is measured."""
        command = ["loadtest", server.url, "--model", "odd", flag, str(tmp_path / "somewhere")]
        done = python(f"import sys\nsys.modules[{package!r}] = None\nfrom mha import main\nmain({command!r})")
        assert done.returncode == 1
        assert done.stderr.startswith(f"Error: {flag}: ")
        assert done.stderr.endswith(f"pip install 'mha-service[{extra}]'\n")

    def test_of_another_package_is_a_defect(self) -> None:
        """A module that no extra brings is not explained away."""
        done = python("import sys\nsys.modules['pydantic'] = None\nfrom mha import main\nmain(['inspect', '--help'])")
        assert done.returncode == 1
        assert re.search(r"^ModuleNotFoundError: .*pydantic", done.stderr, re.MULTILINE)

    def test_export_is_not_needed_to_inspect(self, repository: Path) -> None:
        """`mha inspect` works where neither torch nor onnx nor onnxruntime can be imported."""
        code = f"""
import sys
sys.modules.update(dict.fromkeys(["torch", "onnx", "onnxscript", "onnxruntime", "safetensors"]))
from mha import main
main(["inspect", {str(repository / "odd" / "1")!r}])
"""
        done = python(code)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("model ")


class TestPrintSettings:
    def test_shows_each_with_its_origin(self) -> None:
        """`mha serve --print-settings` shows every setting, its effective value, its origin and its variable."""
        result = mha("serve", "--print-settings", "--port", "1013", "--models", "elsewhere", MHA_MAX_QUEUE_MS="11")
        assert result.exit_code == 0
        rows = {line.split()[0]: line.split()[1:] for line in result.output.splitlines()}
        assert list(rows) == list(Settings.model_fields)
        assert rows["port"] == ["1013", "flag", "MHA_PORT"]
        assert rows["models"] == ["elsewhere", "flag", "MHA_MODELS"]
        assert rows["max_queue_ms"] == ["11", "environment", "MHA_MAX_QUEUE_MS"]
        assert rows["timeout_ms"] == ["30000", "default", "MHA_TIMEOUT_MS"]
        assert rows["api_keys_file"] == ["default", "MHA_API_KEYS_FILE"]

    def test_of_a_server_that_could_not_start(self, tmp_path: Path) -> None:
        """Settings can be looked at where there is nothing to serve."""
        assert mha("serve", "--print-settings", "--models", tmp_path / "nowhere").exit_code == 0


class TestServeRefuses:
    @pytest.mark.parametrize(
        ("flags", "environment", "status", "message"),
        [
            pytest.param(
                [], {"MHA_PROT": "1013"}, 1, "MHA_PROT: no such setting; the nearest is MHA_PORT", id="unknown"
            ),
            pytest.param([], {"MHA_PORT": "http"}, 1, "MHA_PORT: got 'http': ", id="bad_variable"),
            pytest.param(["--port", "70000"], {}, 1, "--port: got 70000: ", id="bad_flag"),
            pytest.param(["--port", "http"], {}, 2, "Invalid value for '--port'", id="flag_of_another_type"),
            pytest.param(["--device", "tpu"], {}, 2, "Invalid value for '--device'", id="no_choice"),
            pytest.param(["--prot", "1013"], {}, 2, "No such option '--prot'.", id="unknown_flag"),
            pytest.param(["--models", "nowhere/at/all"], {}, 1, "models: nowhere/at/all: No such file", id="no_models"),
        ],
    )
    def test_before_it_starts(self, flags: list[str], environment: dict[str, str], status: int, message: str) -> None:
        """What is wrong with a setting is one line on stderr, without a traceback, and the exit status is not 0."""
        command = [sys.executable, "-m", "mha", "serve", *flags]
        done = subprocess.run(
            command, env=clean_environment(**environment), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == status
        error = done.stderr.splitlines()[-1]
        assert error.startswith(f"Error: {message}")
        assert "Traceback" not in done.stderr


class TestInspect:
    def test_shows_what_the_artefact_holds(self, repository: Path) -> None:
        """Sizes, heads, scoring, axes, parity, digests and operators, each on its row."""
        result = mha("inspect", repository / "odd" / "1")
        assert result.exit_code == 0
        rows = [re.split(r"  +", line, maxsplit=1) for line in result.output.splitlines()]
        manifest = json.loads((repository / "odd" / "1" / "manifest.json").read_text())
        assert rows[:3] == [
            ["model", "odd, version 1"],
            ["layer", "21 hiddens, 3 heads of 7, dot_product, bias"],
            ["precision", "fp32"],
        ]
        assert rows[3][0] == "calibration"
        assert re.fullmatch(
            r"largest error \de-0\d of the largest output, mean \de-0\d, limit 1e-05; kind standard normal, seed 0",
            re.sub(r"(\d)\.\d", r"\1", rows[3][1]),
        )
        assert ["source", "kind test"] in rows
        assert ["input", "queries FP32 (batch, num_queries, 11)"] in rows
        assert ["input", "valid_lens INT64 (batch, num_queries)"] in rows
        assert ["output", "output FP32 (batch, num_queries, 21)"] in rows
        assert ["output", "weights FP32 (batch, 3, num_queries, num_kv)"] in rows
        for graph in manifest["lowerings"]:
            size = f"{graph['size_bytes']:,} bytes, sha256 {graph['sha256']} (checked)"
            assert [graph["file"], size] in rows
        assert any(row[0] == "parity" and f"{len(manifest['parity']['cases'])} cases" in row[1] for row in rows)
        assert any("MatMul " in row[-1] and "Softmax 1" in row[-1] for row in rows)
        assert any(row[0] == "tools" and "torch" in row[1] for row in rows)

    def test_json_is_the_manifest(self, repository: Path) -> None:
        """`--json` prints the manifest as it is in the folder."""
        result = mha("inspect", "--json", repository / "additive" / "1")
        assert result.exit_code == 0
        manifest = json.loads((repository / "additive" / "1" / "manifest.json").read_text())
        assert json.loads(result.output) == manifest
        assert manifest["layer"]["scoring"] == "additive"

    @pytest.fixture
    def model(self, repository: Path, tmp_path: Path) -> Path:
        """A model's folder with versions 1, 2 and 10."""
        for version in (1, 2, 10):
            shutil.copytree(repository / "odd" / "1", tmp_path / "odd" / str(version))
        return tmp_path / "odd"

    def test_of_a_model_is_its_newest_version(self, model: Path) -> None:
        """A model's folder stands for its numerically newest version."""
        assert "odd, version 10\n" in mha("inspect", model).output

    def test_of_the_current_folder(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`mha inspect .` works inside a version's folder."""
        monkeypatch.chdir(model / "2")
        assert "odd, version 2\n" in mha("inspect", ".").output

    def test_of_a_tampered_artefact(self, model: Path) -> None:
        """A graph whose digest differs is an error with status 1, and nothing is shown."""
        (model / "1" / "model.onnx").write_bytes(b"other")
        result = mha("inspect", model / "1")
        assert result.exit_code == 1
        assert re.match(r"Error: .*model\.onnx: sha256 is .*, the manifest says .*; export it again\n", result.output)

    def test_of_a_version_without_a_manifest(self, model: Path) -> None:
        """A version's folder in which nothing lies names the file that is missing."""
        (model / "7").mkdir()
        result = mha("inspect", model / "7")
        assert result.exit_code == 1
        assert "manifest.json: No such file or directory; `mha export` writes artefacts" in result.output

    def test_of_a_folder_without_artefacts(self, tmp_path: Path) -> None:
        """A folder that holds none says what a good one looks like."""
        result = mha("inspect", tmp_path)
        assert result.exit_code == 1
        assert "holds no artefact; want a folder like models/attention/1" in result.output

    def test_of_nothing(self, tmp_path: Path) -> None:
        """A folder that is not there is an error with status 1, without a traceback."""
        result = mha("inspect", tmp_path / "no" / "where")
        assert result.exit_code == 1
        assert result.output.startswith("Error: ")
