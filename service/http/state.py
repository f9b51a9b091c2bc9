"""What the routes share. One instance a server, typed; nothing here is global."""

from dataclasses import dataclass, field
from typing import Final, final

from service.admission import Admission
from service.catalog import Catalog
from service.codec import Codec
from service.engine.device import Device
from service.errors import Draining, NotReady
from service.http.body import BodyLimits
from service.http.secrets import Secrets
from service.library import Library
from service.metrics import Metrics
from service.processes.sibling import Siblings
from service.scheduler import Scheduler
from service.settings import Settings
from service.traces import Traces

# Nobody waits for longer than the time-out, and no call is meant to take more than a fraction of this.
_STUCK_S: Final = 5.0


@final
@dataclass(slots=True)
class ServerState:
    """Settings and parts; the library says what is served, and draining is the one thing that changes here.

    `siblings` is set before anything is served.
    """

    settings: Settings
    device: Device
    codecs: dict[str, Codec]
    metrics: Metrics
    admission: Admission
    scheduler: Scheduler
    secrets: Secrets
    library: Library
    traces: Traces | None
    siblings: Siblings = field(init=False)
    draining: bool = field(default=False)

    @property
    def body_limits(self) -> BodyLimits:
        """Of an inference request."""
        return BodyLimits(self.settings.max_body_bytes, self.settings.min_body_rate)

    def served(self) -> Catalog:
        """The catalog.

        Raises:
            NotReady: models are still being loaded.
        """
        return self.library.catalog()

    def names(self) -> list[str]:
        """What is served, as name/version."""
        return [f"{model.artifact.name}/{model.artifact.version}" for model in self.served()]

    def announce_models(self) -> None:
        """Tells the metrics what is served now."""
        self.metrics.model_info.clear()
        for artifact in (model.artifact for model in self.served()):
            labels = (artifact.name, str(artifact.version), artifact.digest, self.device.name)
            self.metrics.model_info.labels(*labels).set(1)

    def check_live(self) -> None:
        """Refuses where only a new process can help.

        Raises:
            NotReady: a device computes no more.
        """
        if not self.library.is_loaded:
            return
        for model in self.served():
            if model.engine.fault is not None:
                name = f"{model.artifact.name}/{model.artifact.version}"
                raise NotReady(f"{name}: its device computes no more; the server's log has the reason")

    def check_ready(self) -> None:
        """Refuses unless new requests are welcome.

        Raises:
            NotReady, Draining: as their names say.
        """
        self.check_live()
        stuck_s = self.scheduler.longest_call_s
        if stuck_s > self.settings.timeout_ms / 1000 + _STUCK_S:
            raise NotReady(f"an engine call has not returned for {stuck_s:.0f} s")
        if self.draining:
            raise Draining("the server is about to end; send new requests elsewhere")
        self.served()
        if not self.siblings.all_ready:
            raise NotReady("a process of the server is still loading models")

    @property
    def is_ready(self) -> bool:
        """Whether `check_ready` passes."""
        try:
            self.check_ready()
        except (NotReady, Draining):
            return False
        return True

    def check_started(self) -> None:
        """Refuses until all models have been loaded, once.

        Raises:
            NotReady: they are still being loaded.
        """
        self.served()
        if not self.siblings.started:
            raise NotReady("a process of the server is still loading models")
