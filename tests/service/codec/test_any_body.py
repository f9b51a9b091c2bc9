"""Whatever bytes come, a codec reads them or refuses them: no other exception, no warning, for any media type."""

import io
import struct
import zipfile
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.errors import ServiceError
from service.tensors import INPUT_NAMES
from tests.hostile.forms import FORMS, Form
from tests.strategies import examples, json_text, json_values, mutated

BODIES = [
    pytest.param(form, body, id=f"{name}_{number}")
    for name, form in FORMS.items()
    for number, body in enumerate(form.good)
]

drawn = examples(250)

# numpy reads what Python 2 and numpy 1 wrote, and warns of it; the service's log takes the warning.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Reading `.npy` or `.npz` file required:UserWarning"),
    pytest.mark.filterwarnings("ignore:Data type alias:DeprecationWarning"),
]


def judge(name: str, body: bytes) -> None:
    """Reads a body as the service does. Anything but a ServiceError gets through, warnings included."""
    try:
        FORMS[name].read(body)
    except ServiceError as error:
        message = str(error)
        assert message
        assert len(message) < 1000


@pytest.mark.parametrize(("form", "body"), BODIES)
def test_good_body_is_read(form: Form, body: bytes) -> None:
    """The bodies that are about to be spoiled are good ones."""
    form.read(body)


@pytest.mark.parametrize("name", FORMS)
@given(body=st.binary(max_size=300))
@example(b"")
@drawn
def test_any_bytes(name: str, body: bytes) -> None:
    """Bytes that mean nothing are refused."""
    judge(name, body)


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
@drawn
def test_spoiled_body(name: str, data: st.DataObject) -> None:
    """A good body in which some bytes were replaced, removed or doubled is read or refused."""
    good = data.draw(st.sampled_from(FORMS[name].good))
    judge(name, data.draw(mutated(good)))


@pytest.mark.parametrize(("form", "body"), BODIES)
def test_body_cut_anywhere(form: Form, body: bytes) -> None:
    """A good body that ends too early is refused, wherever it ends."""
    for end in {*range(0, len(body), 7), *range(max(0, len(body) - 130), len(body))}:
        with pytest.raises(ServiceError):
            form.read(body[:end])


names = st.sampled_from([*INPUT_NAMES, "__metadata__", ""])


@given(document=st.dictionaries(names, json_values(), max_size=3))
@drawn
def test_any_json(document: dict[str, Any]) -> None:
    """Any JSON object is read or refused."""
    judge("json", json_text(document))


sizes = st.one_of(st.integers(0, 3), st.sampled_from([11, 13, 17, 2**31, 2**62, 2**63, 2**64, -1]), json_values())
entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["F32", "F64", "BF16", "I64", "BOOL", "F8"]), json_values()),
        "shape": st.one_of(st.lists(sizes, max_size=9), json_values()),
        "data_offsets": st.one_of(
            st.tuples(st.sampled_from([0, 0, 0, 8]), st.sampled_from([0, 0, 8, 88, 2**63])), st.lists(sizes, max_size=3)
        ),
    }
)


@given(
    header=st.dictionaries(names, st.one_of(entries, entries, json_values()), max_size=3),
    data=st.sampled_from([b"", bytes(8), bytes(88)]),
)
@examples(500)
def test_any_safetensors_header(header: dict[str, Any], data: bytes) -> None:
    """Any JSON object as a header, over any data, is read or refused."""
    text = json_text(header)
    judge("safetensors", struct.pack("<Q", len(text)) + text + data)


npy_headers = st.one_of(
    st.builds(
        "{{'descr': {}, 'fortran_order': {}, 'shape': {}}}".format,
        st.one_of(
            st.sampled_from(["'<f4'", "'>f8'", "'<f2'", "'|b1'", "'<i8'", "'|O'", "'<U0'", "'|V0'", "'<f16'", "''"]),
            st.sampled_from(["('<f4', (2,))", "[('a', '<f4')]", "None", "'M8[s]'", "'a,b'", "1", "'f4,f4'", "'<c8'"]),
        ),
        st.sampled_from(["False", "True", "0", "None"]),
        st.one_of(
            st.lists(st.sampled_from([0, 1, 2, 11, -1, 2**31, 2**62, 2**64, True]), max_size=70).map(tuple),
            st.sampled_from(["(1.0,)", "(2)", "[2]", "()", "(1L,)", "(0x1f,)", "(1if 1else 2,)", "('a',)", "(1e400,)"]),
        ),
    ),
    st.text(st.characters(max_codepoint=255), max_size=60),
)


@given(
    header=npy_headers,
    data=st.sampled_from([b"", bytes(4), bytes(88)]),
    version=st.sampled_from([1, 1, 1, 2, 3, 0]),
    method=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
)
@examples(500)
def test_any_npy_header(header: str, data: bytes, version: int, method: int) -> None:
    """Any text as an array's header, over any data, is read or refused."""
    text = header.encode("latin-1") + b"\n"
    size = len(text).to_bytes(2 if version == 1 else 4, "little")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("queries.npy", b"\x93NUMPY" + bytes([version, 0]) + size + text + data)
    judge("npz", file.getvalue())
