"""`POST /v1/attention`: the natural endpoint, as a plain ASGI application.

A FastAPI route would cost as much as the layer does on a small request (docs/decisions/0003-plain-asgi-inference.md).
"""

from typing import Final, final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from service.http.body import read_body
from service.http.inference import Inference
from service.http.negotiation import answer_codec, request_codec
from service.http.parameters import InferenceParameters
from service.http.state import ServerState
from service.tensors import AttentionInputs


@final
class AttentionEndpoint:
    """Answers inference requests in any codec."""

    route: Final = "/v1/attention"

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Every `ServiceError` goes up to the boundary, which answers it."""
        with self._state.admission.holding() as held:
            await self._answer(Inference(self._state, scope, send, held), scope, receive)

    async def _answer(self, inference: Inference, scope: Scope, receive: Receive) -> None:
        state, headers = self._state, Headers(scope=scope)
        inference.check(headers)
        parameters = InferenceParameters.parse(scope["query_string"])
        model = state.served().find(parameters.model, parameters.version)
        codec = request_codec(headers, state.codecs)
        answering = answer_codec(headers, state.codecs, codec)
        body = await read_body(scope, headers, receive, state.body_limits, inference.held)
        inputs = await inference.decode(
            codec.media_type, len(body), lambda: AttentionInputs.parse(codec.decode(body), model.artifact.layer)
        )
        output = await inference.compute(model, inputs, parameters.weights, parameters.timeout_s)
        chunks = await inference.encode(answering.media_type, output, answering.encode)
        inference.record(model, len(inputs.queries))
        who = (("mha-model", model.artifact.name), ("mha-version", str(model.artifact.version)))
        await inference.answer(answering.media_type, chunks, who)
