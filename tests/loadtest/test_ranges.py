"""Ranges of load."""

import pytest

from loadtest.errors import LoadTestError
from loadtest.ranges import parse_range, whole_range


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("8", [8]), ("1,2,8", [1, 2, 8]), ("1:64:x2", [1, 2, 4, 8, 16, 32, 64]), ("1:10:x4", [1, 4, 10]),
        ("50:200:50", [50, 100, 150, 200]), ("50:90:30", [50, 80, 90]), ("0.5:2:x2", [0.5, 1, 2]), ("7:7:x2", [7]),
    ],
)  # fmt: skip
def test_is_read(text: str, numbers: list[float]) -> None:
    """The end is always among them."""
    assert parse_range("--rate", text) == pytest.approx(numbers)


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "a", "1:64", "64:1:x2", "1:64:x1", "1:64:0", "1:1e9:1", "1:100000:1", "1;2"]
)
def test_anything_else_is_refused(text: str) -> None:
    """The option is named."""
    with pytest.raises(LoadTestError, match=r"--rate: got .* want 8, or"):
        parse_range("--rate", text)


def test_requests_in_flight_are_whole() -> None:
    """Half a request is none."""
    assert whole_range("--concurrency", "1:4:x2") == [1, 2, 4]
    with pytest.raises(LoadTestError, match="whole"):
        whole_range("--concurrency", "1.5")
