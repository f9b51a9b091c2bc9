"""What `service.http.protocol` offers beyond ASGI, in the `extensions` of a request's scope."""

from typing import Final

READ_WHOLE: Final = "mha.read_whole"
"""Its `read` is `Protocol.read_whole` of that request."""
ON_LEAVE: Final = "mha.on_leave"
"""Its `watch` is `Protocol.watch` of that request."""
RESPOND: Final = "mha.respond"
"""Its `respond` is `Protocol.respond` of that request."""
