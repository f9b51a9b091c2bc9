"""Every figure of the document by its name, from what was measured and simulated: pure.

Shape letters: n tokens of one row, d = 512 hiddens. A figure whose measurement is missing is left out.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from benchmarks.scaling.plans import RATE, ZONES
from benchmarks.scaling.queues import MARGIN
from service.artifact import Layer
from service.cost import row_flops

_Results = Mapping[str, Any]
_Figures = dict[str, str]

USED: Final = 0.7
# An Ethernet frame of 1,500 bytes carries 1,448 of a body, and takes 38 more on the wire.
WIRE: Final = 1538 / 1448
LINKS: Final = (10e9, 25e9, 100e9)
INTERNET: Final = 10_000_000.0
MACHINE_CORES: Final = 64
MACHINE_LINK: Final = 100e9
CORE_W: Final = 5.0
GPU_FLOPS: Final = 67e12  # float32 of an H100 SXM, by its data sheet
LAYERS: Final = 12
OVERLOADS: Final = (1.2, 2.0, 5.0, 10.0)
STARTS_S: Final = (30.0, 120.0)
_KIB, _MIB, _KB, _GBIT = 1024, 1024**2, 1000, 1e9
_SIZE: Final = 512
_TITLES: Final = {
    "dense-16": "(1, 16, 16)", "dense-32": "(1, 32, 32)", "dense-64": "(1, 64, 64)", "dense-128": "(1, 128, 128)",
    "self-16": "(1, 16, 16), queries alone", "self-128": "(1, 128, 128), queries alone",
    "half-16": "(1, 16, 16) in float16", "half-128": "(1, 128, 128) in float16",
    "json-16": "(1, 16, 16) as JSON", "json-128": "(1, 128, 128) as JSON",
    "padded": "8 ragged rows, padded to 256 keys", "packed": "the same, packed",
}  # fmt: skip
_LENGTHS: Final = {"dense-16": 16, "dense-32": 32, "dense-64": 64, "dense-128": 128, "self-16": 16, "self-128": 128}
_BALANCERS: Final = {
    "connection": "connections that stay", "random": "at random", "turn": "in turn", "two": "better of two",
    "least": "least busy", "one": "one queue", "two_alike": "better of two, all alike",
}  # fmt: skip


def named(results: _Results, start_s: float) -> _Figures:
    """All that can be told, by name.

    Args:
        results: what `measure`, `check` and `plan` have written.
        start_s: seconds from the start of a server until it is ready.
    """
    found: _Figures = {"start-s": f"{start_s:.1f}"}
    if "costs" in results:
        costs = results["costs"]
        for part in (_costs, _network, _memory, _overload, _internet):
            found |= part(costs)
        found |= _surges(start_s)
    if "check" in results:
        found |= _check(results["check"])
    if "plan" in results:
        found |= _plan(results["plan"])
    return found


def cores(cost_s: float, rate: float = RATE) -> float:
    """That so many requests a second keep busy."""
    return rate * cost_s


def replicas(cost_s: float, rate: float = RATE) -> int:
    """Of one core each, used as far as the document says."""
    return math.ceil(cores(cost_s, rate) / USED)


def wire_bytes(body_bytes: float, head_bytes: float) -> float:
    """On the network, with what Ethernet, IP and TCP add."""
    return (body_bytes + head_bytes) * WIRE


def goodput(times: float, refusal: float) -> float:
    """The part of capacity that is answered where so many times as much comes; a refusal in parts of an answer."""
    return min(times, max(0.0, (1 - times * refusal) / (1 - refusal)))


def deviation(row: _Results, figure: str) -> float:
    """How far the simulation is from the measurement, as a part of the measured; nan where that is 0."""
    measured = row["measured"][figure]
    return float((row["simulated"][figure] - measured) / measured) if measured else math.nan


def flops(length: int) -> int:
    """Of self-attention of so many tokens."""
    layer = Layer(
        num_hiddens=_SIZE, num_heads=8, head_size=64, query_size=_SIZE, key_size=_SIZE, value_size=_SIZE,
        bias=False, scoring="dot_product", scoring_size=None,
    )  # fmt: skip
    return row_flops(layer, length, length)


def compute_s(kind: _Results) -> float:
    """Of one request's engine calls."""
    return float(kind["alone"]["stages_s"]["compute"])


def rest_s(kind: _Results) -> float:
    """Of the core's time for one request, what is not engine calls."""
    return float(kind["cpu_s"]) - compute_s(kind)


def _costs(costs: _Results) -> _Figures:
    kinds = costs["kinds"]
    small, large, alone, json = (kinds[name] for name in ("dense-16", "dense-128", "self-128", "json-128"))
    more_bytes = large["received_bytes"] - alone["received_bytes"]
    rows = [
        [
            _TITLES[name], _us(kind["cpu_s"]), _us(compute_s(kind)), _us(rest_s(kind)), _number(1 / kind["cpu_s"]),
            _number(kind["received_bytes"] / _KB), _number(kind["sent_bytes"] / _KB),
            str(replicas(kind["cpu_s"])),
        ]
        for name, kind in kinds.items()
    ]  # fmt: skip
    head = ["request", "core, us", "computing", "rest", "a core answers", "KB in", "KB out", "replicas for 10,000/s"]
    machine = costs["machine"]
    return {
        "measured-on": (
            f"{machine['cpu']}, one of {machine['cores']} cores, Python {machine['python']}; {costs['date'][:10]}, "
            f"commit {costs['commit'][:12]}{' with changes' if costs['modified'] else ''}"
        ),
        "table-costs": _table(head, rows),
        "dense-16-us": _us(small["cpu_s"]), "dense-128-us": _us(large["cpu_s"]), "self-128-us": _us(alone["cpu_s"]),
        "token-us": _us((large["cpu_s"] - small["cpu_s"]) / (128 - 16)),
        "more-kb": _number(more_bytes / _KB),
        "byte-ns": f"{(large['cpu_s'] - alone['cpu_s']) / more_bytes * 1e9:.2f}",
        "json-byte-ns": f"{(json['cpu_s'] - large['cpu_s']) / (json['received_bytes'] + json['sent_bytes']) * 1e9:.2f}",
        "connection-us": _us(costs["connection_s"]),
        "refusal-16-us": _us(costs["refusals"]["self-16"]["cpu_s"]),
        "refusal-128-us": _us(costs["refusals"]["self-128"]["cpu_s"]),
        "dense-128-ms": f"{large['cpu_s'] * 1e3:.2f}", "dense-128-cores": f"{cores(large['cpu_s']):.1f}",
        "dense-128-replicas": str(replicas(large["cpu_s"])),
        "proxy-cores": f"{cores(_proxy_s(large, more_bytes, alone)):.1f}",
        "proxy-share": f"{_proxy_s(large, more_bytes, alone) / large['cpu_s']:.0%}",
        "handshake-cores": f"{cores(costs['connection_s']):.1f}",
    }  # fmt: skip


def _proxy_s(large: _Results, more_bytes: float, alone: _Results) -> float:
    """Of a proxy that reads and writes each byte both ways, at what it costs the service to read one."""
    return float(2 * (large["received_bytes"] + large["sent_bytes"]) * (large["cpu_s"] - alone["cpu_s"]) / more_bytes)


def _network(costs: _Results) -> _Figures:
    kinds, heads = costs["kinds"], costs["heads"]
    rows = []
    ways = {
        name: (
            wire_bytes(kind["received_bytes"], heads["request"]),
            wire_bytes(kind["sent_bytes"], heads["answer"]),
        )
        for name, kind in kinds.items()
    }
    for name, (bytes_in, bytes_out) in ways.items():
        rates = [link / 8 / max(bytes_in, bytes_out) for link in LINKS]
        rows.append(
            [
                _TITLES[name], f"{RATE * bytes_in * 8 / _GBIT:.1f}", f"{RATE * bytes_out * 8 / _GBIT:.1f}",
                *map(_number, rates), _number(rates[0] * kinds[name]["cpu_s"]),
            ]
        )  # fmt: skip
    head = ["request", "Gbit/s in", "Gbit/s out", "10 Gbit/s", "25 Gbit/s", "100 Gbit/s", "cores that fill 10 Gbit/s"]
    large, json = kinds["dense-128"], kinds["json-128"]
    return {
        "table-network": _table(head, rows),
        "dense-128-fill": _number(LINKS[0] / 8 / ways["dense-128"][0] * large["cpu_s"]),
        "dense-128-kb": _number(large["received_bytes"] / _KB),
        "dense-128-wire-kb": _number(ways["dense-128"][0] / _KB),
        "dense-128-gbit": f"{RATE * ways['dense-128'][0] * 8 / _GBIT:.1f}",
        "request-head": str(heads["request"]), "answer-head": str(heads["answer"]),
        "json-128-mb": f"{json['received_bytes'] / 1e6:.1f}",
        "json-bytes-times": f"{json['received_bytes'] / large['received_bytes']:.1f}",
        "json-cpu-times": f"{json['cpu_s'] / large['cpu_s']:.1f}",
        "json-gbit": f"{RATE * ways['json-128'][0] * 8 / _GBIT:.0f}",
        "json-replicas": str(replicas(json["cpu_s"])),
        "queries-alone-saves": _saved(ways["self-128"], ways["dense-128"]),
        "queries-alone-cpu": _change(kinds["self-128"]["cpu_s"], large["cpu_s"]),
        "half-saves": _saved(ways["half-128"], ways["dense-128"]),
        "half-cpu": _change(kinds["half-128"]["cpu_s"], large["cpu_s"]),
        "packed-saves": _saved(ways["packed"], ways["padded"]),
        "packed-cpu": _change(kinds["packed"]["cpu_s"], kinds["padded"]["cpu_s"]),
    }  # fmt: skip


def _memory(costs: _Results) -> _Figures:
    memory, large = costs["memory"], costs["kinds"]["dense-128"]
    held_bytes = large["received_bytes"] + large["sent_bytes"]
    waiting = MARGIN * 2.0 / large["cpu_s"]
    return {
        "idle-mib": _number(memory["idle_bytes"] / _MIB), "peak-mib": _number(memory["peak_bytes"] / _MIB),
        "waiting": _number(waiting), "held-mb": f"{held_bytes / 1e6:.2f}",
        "queue-mib": _number(waiting * held_bytes / _MIB),
        "machine-gib": _number(MACHINE_CORES * (memory["peak_bytes"] + waiting * held_bytes) / _MIB / 1024),
    }  # fmt: skip


def _overload(costs: _Results) -> _Figures:
    rows = []
    for name in ("self-16", "self-128"):
        refusal = costs["refusals"][name]["cpu_s"] / costs["kinds"][name]["cpu_s"]
        rows.append([_TITLES[name], f"{refusal:.0%}", *(f"{goodput(times, refusal):.0%}" for times in OVERLOADS)])
    head = ["request", "a refusal, of an answer", *(f"{times:g} times" for times in OVERLOADS)]
    return {"table-overload": _table(head, rows)}


def _surges(start_s: float) -> _Figures:
    capacity = RATE / USED
    rows = [
        [f"{times:g} times", _number(times * RATE), f"{times * USED:.0%}",
         *(_number(max(0.0, times * RATE - capacity) * seconds) for seconds in (start_s, *STARTS_S))]
        for times in (1.2, 1.4, 1.5, 2.0, 3.0)
    ]  # fmt: skip
    head = ["load", "requests/s", "of capacity", f"{start_s:.1f} s", *(f"{seconds:.0f} s" for seconds in STARTS_S)]
    return {"capacity": _number(capacity), "table-surges": _table(head, rows)}


def _internet(costs: _Results) -> _Figures:
    kinds = costs["kinds"]
    small, large = kinds["self-16"], kinds["self-128"]
    rows = []
    for name in ("self-16", "self-128", "dense-128", "json-128"):
        kind = kinds[name]
        bits = wire_bytes(kind["received_bytes"], 0) * 8
        by_cores = replicas(kind["cpu_s"], INTERNET) / MACHINE_CORES
        by_network = INTERNET * bits / (USED * MACHINE_LINK)
        rows.append(
            [
                _TITLES[name], _number(replicas(kind["cpu_s"], INTERNET)), f"{INTERNET * bits / 1e12:.1f}",
                _number(by_cores), _number(by_network), "network" if by_network > by_cores else "cores",
                _number(max(by_cores, by_network) * MACHINE_CORES * CORE_W / 1e3),
            ]
        )  # fmt: skip
    head = ["request", "replicas", "Tbit/s in", "machines by cores", "machines by network", "first", "kW"]
    apart_s, together_s = LAYERS * large["cpu_s"], LAYERS * compute_s(large) + rest_s(small)
    apart_bytes = LAYERS * (large["received_bytes"] + large["sent_bytes"])
    together_bytes = 128 * 8 + _SIZE * 4
    return {
        "table-internet": _table(head, rows),
        "table-intensity": _intensity(kinds),
        "gpu-gbit": _number(GPU_FLOPS / (flops(128) / kinds["dense-128"]["received_bytes"]) * 8 / _GBIT),
        "overhead-16": f"{rest_s(small) / small['cpu_s']:.0%}", "overhead-128": f"{rest_s(large) / large['cpu_s']:.0%}",
        "compute-16-us": _us(compute_s(small)),
        "apart-ms": f"{apart_s * 1e3:.1f}", "together-ms": f"{together_s * 1e3:.1f}",
        "apart-times": f"{apart_s / together_s:.2f}",
        "apart-mb": f"{apart_bytes / 1e6:.1f}", "together-kb": f"{together_bytes / _KB:.1f}",
        "bytes-times": _number(apart_bytes / together_bytes),
    }  # fmt: skip


def _intensity(kinds: _Results) -> str:
    rows = []
    for name in ("dense-16", "dense-32", "dense-64", "dense-128", "self-16", "self-128"):
        kind, done = kinds[name], flops(_LENGTHS[name])
        carried = kind["received_bytes"] + kind["sent_bytes"]
        rows.append(
            [
                _TITLES[name], _number(done / 1e6), _number(carried / _KB), _number(done / carried),
                _number(done / compute_s(kind) / 1e9), f"{rest_s(kind) / kind['cpu_s']:.0%}",
            ]
        )  # fmt: skip
    return _table(
        ["request", "Mflop", "KB both ways", "flop a byte", "Gflop/s of a core", "not computing"], rows
    )  # fmt: skip


def _check(check: _Results) -> _Figures:
    def cell(row: _Results, name: str) -> str:
        measured, simulated = row["measured"][name] * 1e3, row["simulated"][name] * 1e3
        return f"{measured:.1f} / {simulated:.1f} ({deviation(row, name):+.0%})"

    figures = ("wait_mean_s", "wait_p99_s", "latency_mean_s", "latency_p99_s")
    rows = [
        [
            f"{row['length']} tokens, {row['load']:.0%} of {row['capacity_per_s']:.0f}/s",
            f"{row['cost_s'] * 1e3:.2f}", f"{row['busy']:.0%}",
            *(cell(row, name) for name in figures),
            f"{row['measured']['refused']:.1%} / {row['simulated']['refused']:.1%}",
        ]
        for row in check["rows"]
    ]  # fmt: skip
    head = ["load", "a request", "core busy", "mean wait", "p99 wait", "mean latency", "p99 latency", "refused"]
    below = [row for row in check["rows"] if row["load"] < 1]
    deviations = sorted(abs(deviation(row, "latency_mean_s")) for row in below)
    return {
        "table-check": _table(head, rows),
        "check-seconds": _number(check["seconds"]), "check-queue-ms": str(check["max_queue_ms"]),
        "check-median": f"{deviations[len(deviations) // 2]:.0%}", "check-worst": f"{deviations[-1]:.0%}",
    }  # fmt: skip


def _plan(plan: _Results) -> _Figures:
    balancing = [
        [f"{row['utilisation']:.0%}", str(row["replicas"]), *(_waited(row[name]) for name in _BALANCERS)]
        for row in plan["balancing"]
    ]
    ways = ("random", "two", "one")
    fewest = [
        [
            _TITLES[row["shape"]],
            f"{row['bound_s'] * 1e3:g} ms",
            *(f"{row[name]:,}" for name in ways),
        ]
        for row in plan["fewest"]
    ]
    failure = [
        [f"{row['before']:.0%}", str(row["replicas"]), f"{row['after']:.0%}", f"{row['wait_p99_s'] * 1e3:.1f}",
         f"{row['refused']:.2%}"]
        for row in plan["failure"]
    ]  # fmt: skip
    return {
        "table-balancing": _table(["used", "replicas", *_BALANCERS.values()], balancing),
        "table-fewest": _table(["request", "p99 wait within", "at random", "better of two", "one queue"], fewest),
        "table-failure": _table(
            ["used before", "replicas", f"used by {ZONES - 1} zones", "p99 wait, ms", "refused"], failure
        ),
    }


def _waited(summary: _Results) -> str:
    refused = f", {summary['refused']:.1%} refused" if summary["refused"] else ""
    return f"{summary['wait_p99_s'] * 1e3:.1f}{refused}"


def _saved(ways: Sequence[float], than: Sequence[float]) -> str:
    return f"{1 - sum(ways) / sum(than):.0%}"


def _change(one_s: float, other_s: float) -> str:
    return f"{one_s / other_s - 1:+.0%}"


def _us(seconds: float) -> str:
    return _number(seconds * 1e6)


def _number(value: float) -> str:
    """With three digits that count."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    rounded = round(value, 2 - math.floor(math.log10(abs(value))))
    return f"{rounded:,.{digits}f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    line: Callable[[Sequence[str]], str] = lambda cells: f"| {' | '.join(cells)} |"  # noqa: E731
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])
