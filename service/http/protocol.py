"""uvicorn's HTTP protocol, with our error body for what is not HTTP at all and so never reaches a route."""

from typing import final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.errors import MalformedBody
from service.http.boundary import new_request_id
from service.http.errors import error_response


@final
class Protocol(HttpToolsProtocol):
    """Answers an unparsable request with 400 `malformed_body`, and closes the connection."""

    def send_400_response(self, msg: str) -> None:
        """Sends the answer; `msg` is uvicorn's own, which says no more than that the request is invalid."""
        request_id = new_request_id()
        response = error_response(MalformedBody(f"request: {msg.rstrip('.')}; want HTTP/1.1"), request_id)
        headers = [*response.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + bytes(response.body))
        self.transport.close()
