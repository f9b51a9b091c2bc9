"""What the routes share. One instance a server, typed; nothing here is global."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import final

from service.catalog import Catalog
from service.codec import Codec
from service.engine.device import Device
from service.errors import Draining, NotReady
from service.http.access import ApiKeys
from service.metrics import Metrics
from service.scheduler import Scheduler
from service.settings import Settings


class Phase(StrEnum):
    """Where a server is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@final
@dataclass(slots=True)
class ServerState:
    """Settings, parts, and the two things that change: the catalog (None until models are loaded) and draining."""

    settings: Settings
    device: Device
    codecs: dict[str, Codec]
    metrics: Metrics
    scheduler: Scheduler
    api_keys: ApiKeys | None
    catalog: Catalog | None = None
    draining: bool = field(default=False)

    @property
    def phase(self) -> Phase:
        """The current phase."""
        if self.draining:
            return Phase.DRAINING
        return Phase.STARTING if self.catalog is None else Phase.READY

    def served(self) -> Catalog:
        """The catalog.

        Raises:
            NotReady: models are still being loaded.
        """
        if self.catalog is None:
            raise NotReady("models are still being loaded; GET /health/ready says when they are")
        return self.catalog

    def check_ready(self) -> None:
        """Refuses unless new requests are welcome.

        Raises:
            NotReady, Draining: as their names say.
        """
        if self.draining:
            raise Draining("the server is about to end; send new requests elsewhere")
        self.served()
