"""`mha loadtest URL`, and `mha loadtest compare OLD NEW`."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import click
import orjson
from rich.console import Console

from loadtest import arrivals, compare, protocols, scenario, sizes, tensors
from loadtest.errors import FAILED, LoadTestError
from loadtest.plan import Options, prepare
from loadtest.session import run
from loadtest.terminal import print_differences, print_report


@final
class _Group(click.Group):
    """Its first argument is `compare`, or the URL of what everybody came for."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return "", measure, args


@click.group(
    "loadtest",
    cls=_Group,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
    short_help="Measure a server under load, honestly.",
)
def loadtest() -> None:
    """Measure a server under load."""


@click.command("run", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("url")
@click.option(
    "--concurrency", metavar="RANGE", help="Requests in flight, closed loop: 8, 1,2,8, 1:64:x2.  [default: 1:16:x4]"
)
@click.option("--rate", metavar="RANGE", help="Requests a second, open loop: 50, 50:800:x2, 100:500:100.")
@click.option("--arrivals", "process", type=click.Choice(arrivals.PROCESSES), default="poisson", show_default=True,
              help="How they come, with --rate.")  # fmt: skip
@click.option("--trace", type=click.Path(path_type=Path), help="Recorded traffic: a line a request, 'offset_s BxQxK'.")
@click.option("--scenario", type=click.Choice(scenario.NAMES), help="One of MLPerf's.")
@click.option("--samples", type=click.IntRange(1), help="Of multi-stream (8) and offline (1000).")
@click.option("--find-max", is_flag=True, help="Find the highest rate that keeps the --slo.")
@click.option("--resolution", type=click.FloatRange(0.001, 1), default=0.05, show_default=True,
              help="How exactly --find-max finds it.")  # fmt: skip
@click.option("--slo", metavar="BOUNDS", help="What has to hold: p99=50ms, or p50=5ms,p99=50ms,errors=1%.")
@click.option(
    "--duration", type=click.FloatRange(0.1), default=8.0, show_default=True, help="Seconds of a level that count."
)
@click.option(
    "--warmup", type=click.FloatRange(0), default=2.0, show_default=True, help="Seconds before it that do not."
)
@click.option("--protocol", type=click.Choice(protocols.PROTOCOLS), default="safetensors", show_default=True,
              help="How tensors are sent.")  # fmt: skip
@click.option("--model", help="Which one, if several are served.")
@click.option("--version", help="Which version of it.  [default: the server's choice]")
@click.option("--batch", metavar="SIZES", default="1", show_default=True, help=f"Entries of a request: {sizes.FORMS}.")
@click.option("--queries", metavar="SIZES", default="16", show_default=True, help="Queries of an entry.")
@click.option("--keys", metavar="SIZES", help="Keys of an entry; makes it cross-attention.  [default: self-attention]")
@click.option("--valid-lens", metavar="SIZES", help="Keys that count, of those.  [default: all]")
@click.option("--form", type=click.Choice(tensors.FORMS), default="padded", show_default=True,
              help="How entries of different lengths are sent.")  # fmt: skip
@click.option(
    "--body", type=click.Path(path_type=Path), help="Send this file to URL as it is: any server, any request."
)
@click.option("--content-type", help="Of --body.  [default: by its name]")
@click.option("--header", "-H", "headers", multiple=True, metavar="'NAME: VALUE'", help="Added to each request.")
@click.option("--insecure", is_flag=True, help="Take any certificate.")
@click.option("--artifact", type=click.Path(path_type=Path),
              help="Folder of the served version: compare answers with float64 from its weights.")  # fmt: skip
@click.option("--check-every", type=click.IntRange(0), default=100, show_default=True,
              help="Compare one answer in so many; 0 compares none.")  # fmt: skip
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="That send.")
@click.option("--connections", type=click.IntRange(1), default=1024, show_default=True, help="At once, in open loop.")
@click.option(
    "--timeout", type=click.FloatRange(0.01), default=60.0, show_default=True, help="Seconds an answer is waited for."
)
@click.option(
    "--bodies",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Made before the clock starts; none is sent twice alike.",
)
@click.option(
    "--bodies-bytes", type=click.IntRange(1), default=2**29, show_default=True, help="That all of them may take."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of tensors, sizes and arrivals.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report here.")
@click.option("--html", "html_path", type=click.Path(path_type=Path), help="Write the report here as a page.")
@click.pass_context
def measure(context: click.Context, /, **options: Any) -> None:
    """Measure the server at URL under load.

    Latency is counted from when a request was due, so that a server that stalls cannot hide it. The exit status is 1 if
    the SLO is missed or an answer is wrong, and 3 if the generator was the bottleneck.

    \b
    mha loadtest http://127.0.0.1:8000
    mha loadtest http://127.0.0.1:8000 --rate 50:800:x2 --slo p99=50ms --html report.html
    mha loadtest http://127.0.0.1:8000 --find-max --slo p99=50ms
    mha loadtest http://127.0.0.1:8000 --batch 8 --queries 1 --keys lognormal:mean=64,max=512 --form packed
    mha loadtest http://127.0.0.1:9000/predict --body request.json
    mha loadtest compare old.json new.json
    """  # noqa: D301  # \b keeps click from rewrapping the examples
    json_path: Path | None = options.pop("json_path")
    html_path: Path | None = options.pop("html_path")
    console = Console(stderr=True)
    try:
        _check_writable(json_path, html_path)
        page = _page() if html_path is not None else None
        report = run(prepare(Options(**options)), _command(), console)
    except LoadTestError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        raise click.Abort from None
    print_report(report, Console())
    if json_path is not None:
        json_path.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    if html_path is not None and page is not None:
        html_path.write_text(page(report))
    context.exit(report["verdict"]["exit_status"])


@loadtest.command("compare", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--threshold", type=click.FloatRange(0, 1), default=0.03, show_default=True,
              help="Differences up to this part do not matter, however certain they are.")  # fmt: skip
@click.pass_context
def compare_reports(context: click.Context, /, old: Path, new: Path, threshold: float) -> None:
    """Say whether the test in NEW was worse than that in OLD (both written with --json).

    Each difference has a 95 % interval from the spread of the windows. The exit status is 1 if something is worse.
    """
    try:
        before, after = _read(old), _read(new)
    except LoadTestError as error:
        raise click.ClickException(str(error)) from error
    found = compare.differences(before, after, threshold)
    if not found:
        raise click.ClickException(f"{old} and {new} have no load in common: {_loads(before)} and {_loads(after)}")
    print_differences(found, compare.unlike(before, after), Console())
    context.exit(FAILED if any(difference.verdict == "worse" for difference in found) else 0)


def _check_writable(*paths: Path | None) -> None:
    # Before half a minute of measuring, not after.
    for path in paths:
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            raise LoadTestError(f"report: {path} cannot be written: no such folder, or it is one")


def _page() -> Callable[[Mapping[str, Any]], str]:
    try:
        from loadtest.page import page  # noqa: PLC0415  # plotly takes its time, and only a page needs it
    except ImportError as error:
        raise LoadTestError(f"--html: {error}; pip install 'mha-service[loadtest]'") from error
    return page


def _command() -> str:
    # As it was typed, but for what nobody should read in a report.
    words, hide = [], False
    for word in sys.argv[1:]:
        words.append("'…'" if hide else word)
        hide = word in ("-H", "--header")
    return " ".join(["mha", *("--header='…'" if word.startswith("--header=") else word for word in words)])


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
        if not isinstance(report, dict) or report.get("format") != "mha-loadtest/1":
            raise LoadTestError(f"{path}: no report of this command; want what --json writes")
    except (OSError, ValueError) as error:
        raise LoadTestError(f"{path}: {error}") from error
    return report


def _loads(report: dict[str, Any]) -> str:
    return ", ".join(level["load"] for level in report["levels"])
