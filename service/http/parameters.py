"""The query parameters of inference, parsed once."""

from dataclasses import dataclass
from typing import Final, Self, final
from urllib.parse import parse_qsl

from service.errors import InvalidParameter
from service.wanted import WantedWeights

NAMES: Final = ("model", "version", "need_weights", "heads", "timeout_ms")


@final
@dataclass(frozen=True, slots=True)
class InferenceParameters:
    """What a client may say beside its tensors."""

    model: str | None = None
    version: str | None = None
    weights: WantedWeights | None = None
    timeout_ms: int | None = None

    @property
    def timeout_s(self) -> float | None:
        """`timeout_ms` in seconds."""
        return None if self.timeout_ms is None else self.timeout_ms / 1000

    @classmethod
    def parse(cls, query_string: bytes) -> Self:
        """The parameters of `?model=&version=&need_weights=&heads=&timeout_ms=`.

        Raises:
            InvalidParameter: an unknown or repeated name, or a value that means nothing.
        """
        if not query_string:
            return cls()
        pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
        given = dict(pairs)
        for name in given:
            if name not in NAMES:
                raise InvalidParameter(f"unknown parameter {name[:64]!r}: want {', '.join(NAMES)}")
        if len(given) < len(pairs):
            raise InvalidParameter("a parameter is given twice")
        return cls(
            model=given.get("model"),
            version=given.get("version"),
            weights=WantedWeights.parse(given.get("need_weights"), given.get("heads")),
            timeout_ms=_milliseconds("timeout_ms", given["timeout_ms"]) if "timeout_ms" in given else None,
        )


def _milliseconds(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < len(text) <= 9 and int(text) > 0):
        raise InvalidParameter(f"{name}: got {text[:64]!r}, want a positive number of milliseconds")
    return int(text)
