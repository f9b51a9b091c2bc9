"""One whole load test: processes, levels or a search, and the report."""

import datetime
from collections.abc import Mapping
from typing import Any, final

from rich.console import Console

from loadtest import judge, machine, reference
from loadtest.errors import FAILED, INVALID, PASSED, LoadTestError
from loadtest.level import Level
from loadtest.plan import Plan
from loadtest.process import Processes, Recipe, started
from loadtest.reference import References
from loadtest.runner import Runner, Settings
from loadtest.search import Search, Trial
from loadtest.terminal import Shown
from loadtest.workload import Composed

FORMAT = "mha-loadtest/1"
Report = dict[str, Any]


def run(plan: Plan, command: str, console: Console) -> Report:
    """Does what is planned, and reports.

    Args:
        plan: what to do.
        command: that asked for it, for the report.
        console: on which progress is shown.

    Raises:
        LoadTestError: nothing could be measured.
    """
    options = plan.options
    recipe = Recipe(plan.target, plan.workload, plan.bodies, options.bodies_bytes)
    with started(recipe, plan.processes) as processes, Shown(console) as shown:
        _check_stock(plan, processes)
        settings = Settings(
            plan.target.at("") if plan.served else None, _references(plan, processes), options.check_every,
            options.connections, options.timeout, options.seed, plan.slo,
        )  # fmt: skip
        measured = _Measured(Runner(processes, settings, shown), shown)
        search = _measure(plan, measured)
        return _report(plan, command, processes, measured.levels, search)


@final
class _Measured:
    # Levels that were run, and their figures.
    def __init__(self, runner: Runner, shown: Shown) -> None:
        self._runner = runner
        self._shown = shown
        self.levels: list[dict[str, Any]] = []

    def run(self, level: Level) -> dict[str, Any]:
        result = self._runner.run(level)
        self.levels.append(result)
        self._shown.ended(result)
        return result

    def warm_up(self, level: Level) -> None:
        self._runner.run(level)


def _measure(plan: Plan, measured: _Measured) -> dict[str, Any] | None:
    """Runs all levels; where a rate is looked for, those that the search wants, and what it found."""
    if not plan.options.find_max:
        if plan.options.scenario == "offline" and plan.options.warmup:
            measured.warm_up(Level("closed", plan.options.warmup, concurrency=plan.levels[0].concurrency))
        for level in plan.levels:
            measured.run(level)
        return None
    (first,) = plan.levels

    def attempt(rate: float) -> Trial:
        result = measured.run(Level("open", first.seconds, first.warmup_s, rate=rate, process=first.process))
        return Trial(not result["slo_missed"], result["slo_clear"])

    search = Search(attempt, plan.options.resolution)
    highest = search.highest(first.rate)
    rates = [
        {"rate": one.rate, "passed": one.passed, "levels": len(one.trials)} for one in search.decisions
    ]  # fmt: skip
    return {"highest": highest, "rates": rates}


def _references(plan: Plan, processes: Processes) -> References | None:
    options, served = plan.options, plan.served
    if served is None or not isinstance(plan.workload, Composed) or not options.check_every:
        return None
    of = reference.indices(processes.stocks)
    if options.artifact is not None:
        digest = served.view.get("digest") if served.is_ours else None
        outputs = reference.from_weights(options.artifact, digest, plan.workload, of)
        return References("float64", outputs, plan.workload, len(processes), served.tolerance)
    outputs = reference.from_server(plan.target, plan.workload, of)
    return References("the server alone", outputs, plan.workload, len(processes), served.tolerance)


def _check_stock(plan: Plan, processes: Processes) -> None:
    # A trace is sent in order, and each of its requests once.
    held = sum(stock.bodies for stock in processes.stocks)
    if plan.options.trace is not None and held < plan.bodies:
        raise LoadTestError(
            f"trace: {held} of its {plan.bodies} bodies take all of --bodies-bytes {plan.options.bodies_bytes}; "
            "allow more"
        )


def _report(
    plan: Plan, command: str, processes: Processes, levels: list[dict[str, Any]], search: dict[str, Any] | None
) -> Report:
    options, stocks = plan.options, processes.stocks
    whole = {name: sum(getattr(stock, name) for stock in stocks) for name in ("bodies", "size_bytes", "tokens")}
    return {
        "format": FORMAT,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "options": plan.settings(),
        "target": plan.target.url,
        "protocol": None if options.body else options.protocol,
        "workload": plan.description(),
        "bodies": {
            "distinct": whole["bodies"],
            "mean_bytes": whole["size_bytes"] / whole["bodies"],
            "mean_tokens": whole["tokens"] / whole["bodies"],
            "never_twice_alike": options.body is None,
        },
        "seed": options.seed,
        "processes": plan.processes,
        "machine": machine.description(),
        "model": None if plan.served is None else dict(plan.served.view),
        "slo": None if plan.slo is None else str(plan.slo),
        "scenario": options.scenario,
        "search": search,
        "levels": levels,
        "verdict": _verdict(plan, levels, search),
    }


def _verdict(plan: Plan, levels: list[dict[str, Any]], search: dict[str, Any] | None) -> dict[str, Any]:
    reasons, status = [], PASSED
    if search is not None:
        reasons.append(_found(plan, search))
    elif plan.scenario is not None:
        reasons.append(plan.scenario.result(levels[0]))
    wrong = [f"{level['load']}: {text}" for level in levels for text in _wrong(level)]
    # While searching, levels have to miss it.
    missed = [] if search is not None else [
        f"{level['load']}: SLO missed: {text}" for level in levels for text in level["slo_missed"] or ()
    ]  # fmt: skip
    unanswered = [_unanswered(level) for level in levels if not level["requests"]["answered"]]
    if wrong or missed or (search["highest"] is None if search is not None else unanswered):
        status = FAILED
    elif any(level["faults"] for level in levels) if search is None else _senders_were_the_limit(levels, search):
        status = INVALID
        reasons.append("invalid: the generator was the bottleneck")
    return {"exit_status": status, "reasons": [*reasons, *wrong, *(missed or unanswered)]}


def _found(plan: Plan, search: dict[str, Any]) -> str:
    if search["highest"] is None:
        lowest = min(one["rate"] for one in search["rates"])
        return f"found no rate that keeps {plan.slo}; not even {lowest:.4g} requests a second do"
    return f"found: {search['highest']:.4g} requests a second keep {plan.slo}"


def _senders_were_the_limit(levels: list[dict[str, Any]], search: dict[str, Any]) -> bool:
    # At the lowest rate that failed.
    lowest = min((one["rate"] for one in search["rates"] if not one["passed"]), default=None)
    return any(
        level["generator"]["busy"] > judge.MOST_CPU for level in levels
        if level["slo_missed"] and level["level"]["rate"] == lowest
    )  # fmt: skip


def _unanswered(level: Mapping[str, Any]) -> str:
    said = next(iter(level["said"].values()), "")
    return f"{level['load']}: nothing was answered" + (f"; the server said: {said}" if said else "")


def _wrong(level: Mapping[str, Any]) -> list[str]:
    compared = level["compared"]
    if not compared or not compared["wrong"]:
        return []
    return [f"{compared['wrong']} of {compared['answers']} answers are wrong: {compared['examples'][0]}"]
