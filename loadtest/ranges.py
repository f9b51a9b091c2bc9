"""Several amounts of load as one word: `1:64:x2`. Pure."""

import math
import re
from typing import Final

from loadtest.errors import LoadTestError

_MOST: Final = 100
_FORM: Final = "8, or 1,2,8, or 1:64:x2 (times two), or 50:200:50 (plus fifty)"


def parse_range(name: str, text: str) -> list[float]:
    """The numbers that a range names, ascending; its end is always among them.

    Args:
        name: of the option, for the error.
        text: `8`, `1,2,8`, `1:64:x2` or `50:200:50`.

    Raises:
        LoadTestError: it is none of these, or names more than a hundred.
    """
    number = r"\d+(?:\.\d+)?"
    if re.fullmatch(rf"{number}(,{number})*", text):
        numbers = [float(one) for one in text.split(",")]
    elif match := re.fullmatch(rf"({number}):({number}):(x?)({number})", text):
        first, last, step = float(match[1]), float(match[2]), float(match[4])
        numbers = _between(first, last, step, is_factor=bool(match[3]))
    else:
        numbers = []
    if not numbers or min(numbers) <= 0 or len(numbers) > _MOST:
        raise LoadTestError(f"{name}: got {text!r}, want {_FORM}, at most {_MOST} of them and none 0")
    return numbers


def whole_range(name: str, text: str) -> list[int]:
    """The same, of whole numbers.

    Raises:
        LoadTestError: as `parse_range`, or they are not whole.
    """
    numbers = parse_range(name, text)
    if any(one != int(one) for one in numbers):
        raise LoadTestError(f"{name}: got {text!r}, want whole numbers")
    return [int(one) for one in numbers]


def _between(first: float, last: float, step: float, *, is_factor: bool) -> list[float]:
    if first <= 0 or last < first or step <= (1 if is_factor else 0):
        return []
    ratio = math.log(last / first, step) if is_factor else (last - first) / step
    count = math.floor(ratio + 1e-9) + 1
    if count > _MOST:
        return []
    numbers = [first * step**place if is_factor else first + step * place for place in range(count)]
    return numbers if math.isclose(numbers[-1], last) else [*numbers, last]
