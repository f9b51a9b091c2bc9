"""The `mha` command. Each subcommand lives in its own package and is imported only when called.

So `mha serve` starts without torch, and `mha export` says what is missing where the export extra is not installed.
"""

import importlib
from typing import Final, final

import click

_COMMANDS: Final = {
    "export": ("export.cli", "export", "Turn a layer into a checked artefact."),
    "heads": ("heads.cli", "heads", "See the heads of a layer, rank them, prune them."),
    "health": ("service.cli", "health", "Ask a server how it is."),
    "inspect": ("service.cli", "inspect", "Show what an artefact holds."),
    "loadtest": ("loadtest.cli", "loadtest", "Measure a server under load, honestly."),
    "serve": ("service.cli", "serve", "Serve the artefacts of a repository over HTTP."),
}
_EXTRAS: Final = {
    "hdrh": "loadtest",
    "matplotlib": "heads",
    "torch": "export",
    "onnx": "export",
    "onnxscript": "export",
    "safetensors": "export",
    "rich": "export",
    "onnxruntime": "cpu",
}


@final
class _Subcommands(click.Group):
    """A click group whose members are imported by name, on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise click.ClickException(_missing(cmd_name, error)) from error
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}.{attribute} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        # Written from the table, so that `mha --help` imports nothing.
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, _, summary) in sorted(_COMMANDS.items())])


def _missing(command: str, error: ModuleNotFoundError) -> str:
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        raise error
    extra = command if command in ("loadtest", "heads") else _EXTRAS[package]  # some packages are in several extras
    return f"'mha {command}' needs {package}, which is not installed: pip install 'mha-service[{extra}]'"


@click.group(cls=_Subcommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mha-service", prog_name="mha")
def main() -> None:
    """Multi-head attention as a service: export a layer, serve it, load-test it, see and prune its heads."""


if __name__ == "__main__":
    main()
