"""Who may ask for what: API keys, known by their sha256 only, each good for some kinds of request."""

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, final

from starlette.datastructures import Headers

from service.errors import Forbidden, StartupError, Unauthorized

Scope = Literal["infer", "repository"]
_SCOPES: Final = ("infer", "repository")
_LINE: Final = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,64}):(?P<digest>[0-9a-f]{64})(?::(?P<scopes>[a-z,]+))?")


@final
@dataclass(frozen=True, slots=True)
class _Key:
    digest: str
    scopes: frozenset[str]


@final
class ApiKeys:
    """The keys of a file, each line `name:sha256-of-the-key` in hex, and `:` with the scopes unless it is infer alone.

    Blank lines and `#` comments are skipped.

    Raises:
        StartupError: the file cannot be read, a line has another form, or it holds no key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = _read(path)

    def reload(self) -> None:
        """Reads the file again.

        Raises:
            StartupError: as at first; the keys are those from before.
        """
        self._keys = _read(self._path)

    def check(self, headers: Headers, scope: Scope) -> str:
        """The name of the key in `Authorization: Bearer` or `X-API-Key`.

        Raises:
            Unauthorized: no key, or an unknown one.
            Forbidden: the key is not good for this.
        """
        scheme, _, token = headers.get("authorization", "").partition(" ")
        sent = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not sent:
            raise Unauthorized("an API key is required: send Authorization: Bearer <key>, or X-API-Key: <key>")
        digest = hashlib.sha256(sent.encode("latin-1", "replace")).hexdigest()
        # Every entry is compared, so that the time taken tells nothing about which one matched.
        keys = self._keys
        matches = [name for name, key in keys.items() if hmac.compare_digest(digest, key.digest)]
        if not matches:
            raise Unauthorized("the API key is not known here")
        allowed = [name for name in matches if scope in keys[name].scopes]
        if not allowed:
            raise Forbidden(f"the API key {matches[0]!r} is not good for this: it wants the scope {scope!r}")
        return allowed[0]


def _read(path: Path) -> Mapping[str, _Key]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise StartupError(f"api_keys_file: {path}: {reason}") from error
    keys: dict[str, _Key] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        where = f"api_keys_file: {path}: line {number}"
        match = _LINE.fullmatch(text)
        scopes = frozenset((match["scopes"] or "infer").split(",")) if match is not None else frozenset()
        if match is None or not scopes <= set(_SCOPES):
            raise StartupError(
                f"{where}: want name:sha256, 64 lower-case hex digits, and perhaps :{','.join(_SCOPES)} or one of them"
            )
        if match["name"] in keys:
            raise StartupError(f"{where}: there is a key named {match['name']!r} already")
        keys[match["name"]] = _Key(match["digest"], scopes)
    if not keys:
        raise StartupError(f"api_keys_file: {path}: holds no key")
    return keys
