"""What one process has found out and the others need not find out again."""

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any, final


@final
class Notebook:
    """Values by name, in memory that all processes of a server share. Made before they are forked.

    One that dies while it finds something out leaves the lock free, since the kernel holds it for the process.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("notebook")

    def recall(self, name: str, find_out: Callable[[], Any]) -> Any:
        """The value of that name; `find_out` makes it, as JSON has it, for whichever process comes first.

        One thread of a process at a time.
        """
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            written = os.pread(self._file, os.fstat(self._file).st_size, 0)
            values = json.loads(written) if written else {}
            if name not in values:
                values[name] = find_out()
                os.pwrite(self._file, json.dumps(values).encode(), 0)
            return values[name]
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
