"""Bytes to tensors and back, one module a media type. A codec knows its format and nothing of attention's rules."""

from collections.abc import Sequence
from typing import Protocol

from service.tensors import AttentionOutput, WireTensors

Body = bytes | bytearray | memoryview
Chunk = bytes | memoryview


class Codec(Protocol):
    """One media type. Both methods are pure."""

    @property
    def media_type(self) -> str:
        """As in Content-Type and Accept."""

    def decode(self, body: Body) -> WireTensors:
        """The tensors of a body, as views of it where the format allows.

        Raises:
            MalformedBody: the bytes are not of this format.
            InvalidShape, InvalidDtype: the format can tell, and the tensor is not one array of numbers.
        """

    def encode(self, output: AttentionOutput) -> Sequence[Chunk]:
        """The answer's body, in pieces, so that tensors need not be copied into one."""
