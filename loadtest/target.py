"""Where requests go."""

import ssl
from dataclasses import dataclass, field
from typing import Any, final
from urllib.parse import urlencode, urlsplit

from loadtest.errors import LoadTestError
from loadtest.protocols import Body


@final
@dataclass(frozen=True, slots=True)
class Target:
    """A URL to post to.

    Attributes:
        scheme, host, port, path: its parts; the path has the query.
        headers: added to every request.
        insecure: whether any certificate is good enough.
    """

    scheme: str
    host: str
    port: int
    path: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    insecure: bool = False

    @property
    def base(self) -> str:
        """Scheme, host and port."""
        return f"{self.scheme}://{self._authority}"

    @property
    def url(self) -> str:
        """Everything."""
        return self.base + self.path

    @property
    def _authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def at(self, path: str, **query: Any) -> "Target":
        """The same server, another path."""
        given = {name: value for name, value in query.items() if value is not None}
        whole = f"{path}?{urlencode(given)}" if given else path
        return Target(self.scheme, self.host, self.port, whole, self.headers, self.insecure)

    def head(self, body: Body) -> bytes:
        """The request's head for that body."""
        headers = {"Host": self._authority, "Content-Type": body.media_type, "Content-Length": str(len(body.content))}
        lines = [f"{name}: {value}" for name, value in {**headers, **body.headers, **dict(self.headers)}.items()]
        return "\r\n".join([f"POST {self.path} HTTP/1.1", *lines, "", ""]).encode("latin-1")

    def tls(self) -> ssl.SSLContext | None:
        """How to encrypt; None for http."""
        if self.scheme == "http":
            return None
        context = ssl.create_default_context()
        if self.insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


def parse_target(url: str, headers: tuple[tuple[str, str], ...] = (), *, insecure: bool = False) -> Target:
    """The parts of a URL. Without a scheme it is http.

    Raises:
        LoadTestError: it is no http URL.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError) as error:
        raise LoadTestError(f"url: got {url!r}, want one like http://127.0.0.1:8000") from error
    if not parts.hostname:
        raise LoadTestError(f"url: got {url!r}, which names no host; want one like http://127.0.0.1:8000")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, parts.hostname, port, path, headers, insecure)
