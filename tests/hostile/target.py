"""What atheris runs: a body of one form is read or refused, and nothing else happens.

A process of its own, because the fuzzer ends it: `python -m tests.hostile.target FORM [libFuzzer's arguments]`.
"""

import sys
import warnings

import atheris  # type: ignore[import-not-found]  # in the extra `fuzz`, which the tests do not need

with atheris.instrument_imports(include=["service", "zipfile"]):
    from service.errors import ServiceError
    from tests.hostile.forms import FORMS

_LONGEST_MESSAGE = 1000


def main() -> None:
    """Fuzzes until libFuzzer ends the process."""
    form = FORMS[sys.argv.pop(1)]
    warnings.simplefilter("error")
    # numpy reads what Python 2 and numpy 1 wrote, and warns of it; the service's log takes the warning.
    warnings.filterwarnings("ignore", message="Reading `.npy` or `.npz` file required", category=UserWarning)
    warnings.filterwarnings("ignore", message="Data type alias", category=DeprecationWarning)

    def read(data: bytes) -> None:
        try:
            form.read(data)
        except ServiceError as error:
            message = str(error)
        else:
            return
        assert 0 < len(message) < _LONGEST_MESSAGE

    atheris.Setup(sys.argv, read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
