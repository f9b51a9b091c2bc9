"""From options to what is to be done: where, what, how much. Asks the server what it serves, and nothing else."""

import mimetypes
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from loadtest.arrivals import Process, read_trace
from loadtest.discovery import Served, discover
from loadtest.errors import LoadTestError
from loadtest.level import Level
from loadtest.protocols import Body, Protocol
from loadtest.ranges import parse_range, whole_range
from loadtest.scenario import Name, Scenario, scenario
from loadtest.shapes import Mix
from loadtest.sizes import Sizes, parse_sizes
from loadtest.slo import Slo, parse_slo
from loadtest.target import Target, parse_target
from loadtest.tensors import Composer, Form
from loadtest.workload import Brought, Composed, Workload

_DEFAULT_CONCURRENCY: Final = "1:16:x4"
_OFFLINE_CONCURRENCY: Final = 32
_MEDIA_TYPES: Final = {".npz": "application/x-npz", ".safetensors": "application/vnd.safetensors"}


@final
@dataclass(frozen=True, slots=True)
class Options:
    """As they are given on the command line, whose help says what each means."""

    url: str
    concurrency: str | None = None
    rate: str | None = None
    process: Process = "poisson"
    trace: Path | None = None
    scenario: Name | None = None
    samples: int | None = None
    find_max: bool = False
    resolution: float = 0.05
    slo: str | None = None
    duration: float = 8.0
    warmup: float = 2.0
    protocol: Protocol = "safetensors"
    model: str | None = None
    version: str | None = None
    batch: str = "1"
    queries: str = "16"
    keys: str | None = None
    valid_lens: str | None = None
    form: Form = "padded"
    body: Path | None = None
    content_type: str | None = None
    headers: tuple[str, ...] = ()
    insecure: bool = False
    artifact: Path | None = None
    check_every: int = 100
    processes: int = 1
    connections: int = 1024
    timeout: float = 60.0
    bodies: int = 256
    bodies_bytes: int = 2**29
    seed: int = 0


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done.

    Attributes:
        options: that it comes from.
        target: where requests go.
        served: the model; None with a body that the user brought.
        workload: what is sent.
        levels: one after the other; with `find_max`, the one that the search starts with.
        scenario: if it is one.
        slo: that has to hold.
    """

    options: Options
    target: Target
    served: Served | None
    workload: Workload
    levels: tuple[Level, ...]
    scenario: Scenario | None
    slo: Slo | None

    @property
    def processes(self) -> int:
        """That send: one where requests wait for each other."""
        alone = self.options.scenario in ("single-stream", "multi-stream")
        return 1 if alone else self.options.processes

    @property
    def bodies(self) -> int:
        """That are made: each request of a trace has its own."""
        if not isinstance(self.workload, Composed):
            return 1
        shapes = self.workload.mix
        return len(shapes) if isinstance(shapes, tuple) else self.options.bodies

    def settings(self) -> dict[str, Any]:
        """Every option, for the report; of headers the names alone."""
        given = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self.options).items()}
        return {**given, "headers": [name for name, _ in self.target.headers]}

    def description(self) -> dict[str, Any]:
        """Of the workload, for the report."""
        options = self.options
        if options.body is not None:
            return {"body": str(options.body)}
        names = ("batch", "queries", "keys", "valid_lens", "form")
        shapes: dict[str, Any] = (
            {"trace": str(options.trace)} if options.trace else {name: getattr(options, name) for name in names}
        )
        return {**shapes, "attention": "self" if options.keys is None and not options.trace else "cross"}


def prepare(options: Options) -> Plan:
    """The plan for these options.

    Raises:
        LoadTestError: they contradict each other, or the server does not have what they name.
    """
    _check(options)
    slo = None if options.slo is None else parse_slo(options.slo)
    chosen = _scenario(options)
    levels = (chosen.level,) if chosen else _levels(options)
    target = parse_target(options.url, _headers(options.headers), insecure=options.insecure)
    slo = slo or (chosen.slo if chosen else None)
    if options.body is not None:
        return Plan(options, target, None, Brought(_brought(options, options.body)), levels, chosen, slo)
    shapes = read_trace(options.trace).shapes if options.trace else _mix(options)
    served = discover(target, options.model, options.version)
    if not served.is_ours and not options.protocol.startswith("oip"):
        raise LoadTestError(
            f"{target.base}: speaks the Open Inference Protocol only; use --protocol oip-binary or oip-json"
        )
    path, query = served.path(options.protocol)
    composer = Composer(served.layer, options.form, complete=not served.is_ours)
    workload = Composed(options.protocol, composer, shapes, options.seed)
    return Plan(options, target.at(path, **query), served, workload, levels, chosen, slo)


def _check(options: Options) -> None:
    ways = {
        "--concurrency": options.concurrency, "--rate": options.rate, "--trace": options.trace,
        "--scenario": options.scenario,
    }  # fmt: skip
    given = [name for name, value in ways.items() if value is not None]
    if options.scenario == "server":
        given = [name for name in given if name != "--rate"]
    if options.scenario == "offline":
        given = [name for name in given if name != "--concurrency"]
    if len(given) > 1:
        raise LoadTestError(f"{' and '.join(given)}: each says how requests come; give one")
    if options.find_max and given not in ([], ["--rate"], ["--scenario"]):
        raise LoadTestError(f"--find-max: looks for a rate, which {given[0]} has none of")
    if options.find_max and options.scenario not in (None, "server"):
        raise LoadTestError(f"--find-max: scenario {options.scenario} has no rate; use server, or none")
    if options.find_max and options.slo is None and options.scenario is None:
        raise LoadTestError("--find-max: want --slo, such as p99=50ms, for what the rate has to keep")
    if options.form == "packed" and options.valid_lens is not None:
        raise LoadTestError("--valid-lens: packed keys have no padding, so all of them count; use --form padded")
    if options.form == "packed" and options.protocol.startswith("oip"):
        raise LoadTestError(f"--form packed: {options.protocol} has no packed tensors; use safetensors, npz or json")
    if options.body is not None and options.artifact is not None:
        raise LoadTestError("--artifact: what a --body asks for is not known, so its answer cannot be computed")


def _scenario(options: Options) -> Scenario | None:
    if options.scenario is None:
        return None
    rate = None if options.rate is None else parse_range("--rate", options.rate)[0]
    rate = _first_rate(options) if options.find_max else rate
    concurrency = _OFFLINE_CONCURRENCY
    if options.concurrency is not None:
        concurrency = whole_range("--concurrency", options.concurrency)[0]
    return scenario(options.scenario, _base(options), rate, options.samples, concurrency)


def _levels(options: Options) -> tuple[Level, ...]:
    base = _base(options)
    if options.trace is not None:
        last_s = float(read_trace(options.trace).due_s[-1])
        # Whoever was due last has to be sent, too.
        return (Level("trace", last_s + 0.001, trace=options.trace),)
    if options.find_max:
        return (replace(base, kind="open", rate=_first_rate(options)),)
    if options.rate is not None:
        rates = parse_range("--rate", options.rate)
        return tuple(replace(base, kind="open", rate=rate) for rate in rates)
    concurrencies = whole_range("--concurrency", options.concurrency or _DEFAULT_CONCURRENCY)
    return tuple(replace(base, concurrency=one) for one in concurrencies)


def _first_rate(options: Options) -> float:
    return 16.0 if options.rate is None else parse_range("--rate", options.rate)[0]


def _base(options: Options) -> Level:
    return Level("closed", options.duration, options.warmup, process=options.process)


def _mix(options: Options) -> Mix:
    def of(text: str | None) -> Sizes | None:
        return None if text is None else parse_sizes(text)

    return Mix(parse_sizes(options.batch), parse_sizes(options.queries), of(options.keys), of(options.valid_lens))


def _brought(options: Options, path: Path) -> Body:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LoadTestError(f"body: {path}: {error}") from error
    by_name = _MEDIA_TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0]
    return Body(content, options.content_type or by_name or "application/octet-stream")


def _headers(given: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    pairs = [tuple(part.strip() for part in one.split(":", 1)) for one in given]
    for one, pair in zip(given, pairs, strict=True):
        if len(pair) != 2 or not pair[0] or any(character in one for character in "\r\n"):
            raise LoadTestError(f"header: got {one!r}, want 'Name: value'")
    return tuple((pair[0], pair[1]) for pair in pairs)
