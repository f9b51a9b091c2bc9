"""Content-Type chooses the codec of the request, Accept that of the answer."""

from collections.abc import Mapping

import mimeparse
from starlette.datastructures import Headers

from service.codec import Codec
from service.errors import NotAcceptable, UnsupportedMediaType

Codecs = Mapping[str, Codec]


def request_codec(headers: Headers, codecs: Codecs) -> Codec:
    """The codec of the body; JSON where no Content-Type is given.

    Raises:
        UnsupportedMediaType: no codec reads it, or the body has a Content-Encoding.
    """
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise UnsupportedMediaType(f"Content-Encoding: got {encoding[:64]!r}, want none")
    content_type = headers.get("content-type", "application/json")
    codec = codecs.get(content_type.partition(";")[0].strip().lower())
    if codec is None:
        raise UnsupportedMediaType(f"Content-Type: got {content_type[:64]!r}, want one of {', '.join(codecs)}")
    return codec


def answer_codec(headers: Headers, codecs: Codecs, asked_in: Codec) -> Codec:
    """The codec of the answer: the client's preference, and among equals the codec it asked in.

    Raises:
        NotAcceptable: none of the accepted types can be produced.
    """
    accept = ", ".join(headers.getlist("accept")).lower()
    if accept in ("", "*/*"):
        return asked_in
    by_desire = [media_type for media_type in codecs if media_type != asked_in.media_type] + [asked_in.media_type]
    try:
        chosen = mimeparse.best_match(by_desire, accept)
    except mimeparse.MimeTypeParseException:
        chosen = ""
    if not chosen:
        raise NotAcceptable(f"Accept: got {accept[:64]!r}, want one of {', '.join(codecs)}")
    return codecs[chosen]
