"""What `service.http.protocol` offers beyond ASGI, in the `extensions` of a request's scope."""

from collections.abc import Sequence
from typing import Final, Protocol

from service.codec import Chunk

Header = tuple[bytes, bytes]

READ_WHOLE: Final = "mha.read_whole"
"""Its `read` is `Protocol.read_whole` of that request."""
ON_LEAVE: Final = "mha.on_leave"
"""Its `watch` is `Protocol.watch` of that request."""
ON_STAGE: Final = "mha.on_stage"
"""Its `note` is to be called with each stage of that request; the boundary offers it where requests are traced."""
RESPOND: Final = "mha.respond"
"""Its `respond` is `Protocol.respond` of that request."""


class Respond(Protocol):
    """Answers a request as a whole."""

    async def __call__(
        self, status: int, headers: Sequence[Header], chunks: Sequence[Chunk], *, closes: bool = False
    ) -> None:
        """Writes it; with `closes` the connection ends."""
