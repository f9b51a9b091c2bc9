"""TLS: a certificate and its key, which may be renewed while the server runs."""

import ssl
from pathlib import Path
from typing import final

from service.errors import StartupError


@final
class Tls:
    """The context of every connection, TLS 1.2 or later.

    Args:
        certificate: PEM, the server's own first, then what leads to a root.
        key: PEM, without a pass phrase.

    Raises:
        StartupError: one of them is missing, cannot be read, or they do not fit.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.reload()

    @classmethod
    def of(cls, certificate: Path | None, key: Path | None) -> "Tls | None":
        """That of the two settings, or None if neither is set.

        Raises:
            StartupError: only one is set, or as the constructor.
        """
        if certificate is None and key is None:
            return None
        if certificate is None or key is None:
            missing = "tls_certificate" if certificate is None else "tls_key"
            raise StartupError(f"{missing}: TLS wants a certificate and its key, and this one is not set")
        return cls(certificate, key)

    def reload(self) -> None:
        """Reads both files again, for the connections that come from now on.

        Raises:
            StartupError: as the constructor; the context is that from before.
        """
        for setting, path in (("tls_certificate", self._certificate), ("tls_key", self._key)):
            try:
                path.read_bytes()
            except OSError as error:
                raise StartupError(f"{setting}: {path}: {error.strerror}") from error
        try:
            # Tried on another one first: a context whose key does not fit would refuse everybody.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._certificate, self._key, _no_pass_phrase)
            self.context.load_cert_chain(self._certificate, self._key, _no_pass_phrase)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error)
            raise StartupError(
                f"tls_certificate: {self._certificate} and {self._key} cannot be used: {reason}"
            ) from error


def _no_pass_phrase() -> str:
    # Without this OpenSSL would ask for one on the terminal, and wait.
    raise ValueError("the key wants a pass phrase")
