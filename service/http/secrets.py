"""What is read from files that only the server may see, at the start and again when somebody says that they changed."""

from dataclasses import dataclass
from typing import Self, final

import structlog

from service.errors import StartupError
from service.http.access import ApiKeys
from service.http.tls import Tls
from service.settings import Settings

_log = structlog.get_logger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Secrets:
    """The API keys and the certificate, each None where the settings name none."""

    api_keys: ApiKeys | None = None
    tls: Tls | None = None

    @classmethod
    def read(cls, settings: Settings) -> Self:
        """Those that the settings name.

        Raises:
            StartupError: one cannot be used.
        """
        keys = None if settings.api_keys_file is None else ApiKeys(settings.api_keys_file)
        return cls(keys, Tls.of(settings.tls_certificate, settings.tls_key))

    def reload(self) -> None:
        """Reads them again. What cannot be used leaves what there was, and a line in the log."""
        parts = {"API keys": self.api_keys, "certificate": self.tls}
        for what, part in parts.items():
            if part is None:
                continue
            try:
                part.reload()
            except StartupError as error:
                _log.error("not reloaded", what=what, reason=str(error))
            else:
                _log.info("reloaded", what=what)
