"""Who may ask for inference: API keys, known by their sha256 only."""

import hashlib
import hmac
import re
from pathlib import Path
from typing import Final, final

from starlette.datastructures import Headers

from service.errors import StartupError, Unauthorized

_LINE: Final = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,64}):(?P<digest>[0-9a-f]{64})")


@final
class ApiKeys:
    """The keys of a file, each line `name:sha256-of-the-key` in hex; blank lines and `#` comments are skipped."""

    def __init__(self, digests: dict[str, str]) -> None:
        self._digests = digests

    @classmethod
    def read(cls, path: Path) -> "ApiKeys":
        """The keys of a file.

        Raises:
            StartupError: it cannot be read, a line has another form, or it holds no key.
        """
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise StartupError(f"api_keys_file: {path}: {error.strerror}") from error
        digests = {}
        for number, line in enumerate(lines, start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            match = _LINE.fullmatch(text)
            if match is None:
                raise StartupError(f"api_keys_file: {path}: line {number}: want name:sha256, 64 lower-case hex digits")
            digests[match["name"]] = match["digest"]
        if not digests:
            raise StartupError(f"api_keys_file: {path}: holds no key")
        return cls(digests)

    def check(self, headers: Headers) -> str:
        """The name of the key in `Authorization: Bearer` or `X-API-Key`.

        Raises:
            Unauthorized: no key, or an unknown one.
        """
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not key:
            raise Unauthorized("an API key is required: send Authorization: Bearer <key>, or X-API-Key: <key>")
        digest = hashlib.sha256(key.encode("latin-1", "replace")).hexdigest()
        # Every entry is compared, so that the time taken tells nothing about which one matched.
        matches = [name for name, known in self._digests.items() if hmac.compare_digest(digest, known)]
        if not matches:
            raise Unauthorized("the API key is not known here")
        return matches[0]
