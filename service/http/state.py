"""What the routes share. One instance a server, typed; nothing here is global."""

from dataclasses import dataclass, field
from typing import final

from service.catalog import Catalog
from service.codec import Codec
from service.engine.device import Device
from service.errors import Draining
from service.http.access import ApiKeys
from service.library import Library
from service.metrics import Metrics
from service.scheduler import Scheduler
from service.settings import Settings


@final
@dataclass(slots=True)
class ServerState:
    """Settings and parts; the library says what is served, and draining is the one thing that changes here."""

    settings: Settings
    device: Device
    codecs: dict[str, Codec]
    metrics: Metrics
    scheduler: Scheduler
    api_keys: ApiKeys | None
    library: Library
    draining: bool = field(default=False)

    def served(self) -> Catalog:
        """The catalog.

        Raises:
            NotReady: models are still being loaded.
        """
        return self.library.catalog()

    def announce_models(self) -> list[str]:
        """Tells the metrics what is served now; returns it as name/version."""
        served = list(self.served())
        self.metrics.model_info.clear()
        for artifact in (model.artifact for model in served):
            labels = (artifact.name, str(artifact.version), artifact.digest, self.device.name)
            self.metrics.model_info.labels(*labels).set(1)
        return [f"{model.artifact.name}/{model.artifact.version}" for model in served]

    def check_ready(self) -> None:
        """Refuses unless new requests are welcome.

        Raises:
            NotReady, Draining: as their names say.
        """
        if self.draining:
            raise Draining("the server is about to end; send new requests elsewhere")
        self.served()
