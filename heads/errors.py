"""What stops a command on heads."""


class HeadsError(Exception):
    """Nothing was written. The message says what, where, got, want."""
