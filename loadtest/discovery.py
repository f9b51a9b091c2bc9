"""Which model a server serves, and of what sizes: from our `/v1/models`, or from Open Inference Protocol metadata."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from loadtest.errors import LoadTestError
from loadtest.protocols import Protocol
from loadtest.target import Target
from loadtest.tensors import Layer
from loadtest.web import get_json

_INPUTS: Final = {"queries", "keys", "values", "valid_lens"}
# Of float32, as a part of the largest output.
_TOLERANCE: Final = 1e-5


@final
@dataclass(frozen=True, slots=True)
class Served:
    """A model that a server answers for.

    Attributes:
        name, version: of the model; version None is the server's choice.
        layer: sizes of the inputs.
        tolerance: largest error of an output that is no error, as a part of the largest output.
        view: what the server says of it, for the report.
        is_ours: whether the server knows the whole contract, or serves a bare graph that wants every input.
    """

    name: str
    version: str | None
    layer: Layer
    tolerance: float
    view: Mapping[str, Any] = field(repr=False)
    is_ours: bool = True

    def path(self, protocol: Protocol) -> tuple[str, dict[str, Any]]:
        """Where to post, and the query."""
        if not protocol.startswith("oip"):
            return "/v1/attention", {"model": self.name, "version": self.version}
        version = "" if self.version is None else f"/versions/{self.version}"
        return f"/v2/models/{self.name}{version}/infer", {}


def discover(server: Target, model: str | None, version: str | None) -> Served:
    """The model of that name, or the only one.

    Raises:
        LoadTestError: there is no such model, or several and none is named, or the server does not say.
    """
    listed = get_json(server.at("/v1/models"))
    if isinstance(listed, dict) and "models" in listed:
        return _ours(server, listed["models"], model, version)
    if model is None:
        raise LoadTestError(
            f"{server.base}: has no /v1/models to tell what it serves; name the --model, if it is an Open Inference "
            "Protocol server, or bring a --body"
        )
    return _foreign(server, model, version)


def _ours(server: Target, models: list[dict[str, Any]], model: str | None, version: str | None) -> Served:
    names = [one["name"] for one in models]
    if model is None and len(names) != 1:
        raise LoadTestError(f"{server.base}: serves {', '.join(names) or 'nothing'}; name one with --model")
    name = names[0] if model is None else model
    versions = get_json(server.at(f"/v1/models/{name}"))
    if versions is None:
        raise LoadTestError(f"model: got {name!r}, {server.base} serves {', '.join(names) or 'nothing'}")
    found = [one for one in versions["versions"] if version in (None, str(one["version"]))]
    if not found:
        known = ", ".join(str(one["version"]) for one in versions["versions"])
        raise LoadTestError(f"version: got {version}, {server.base} serves {known} of {name}")
    view = found[-1]
    layer = Layer(*(view["layer"][size] for size in ("query_size", "key_size", "value_size")))
    return Served(name, version, layer, _tolerance(view), view, is_ours=True)


def _tolerance(view: Mapping[str, Any]) -> float:
    # What its export was held to; int8 is held to a part of the output, too.
    return float(
        view["calibration"]["limit"] if view["precision"] == "int8" else max(view["parity"]["limit"], _TOLERANCE)
    )


def _foreign(server: Target, model: str, version: str | None) -> Served:
    path = f"/v2/models/{model}" + ("" if version is None else f"/versions/{version}")
    view = get_json(server.at(path))
    inputs = {one["name"]: one for one in view["inputs"]} if isinstance(view, dict) and "inputs" in view else {}
    if set(inputs) != _INPUTS:
        raise LoadTestError(
            f"model: {server.base}{path} has inputs {sorted(inputs) or 'unknown'}, want {sorted(_INPUTS)}; "
            "bring a --body for another model"
        )
    sizes = [int(inputs[name]["shape"][-1]) for name in ("queries", "keys", "values")]
    if min(sizes) < 1:
        raise LoadTestError(f"model: {server.base}{path} does not tell its sizes: {sizes}")
    return Served(model, version, Layer(*sizes), _TOLERANCE, view, is_ours=False)
