"""What stops a load test, and what its exit status says."""

from typing import Final

PASSED: Final = 0
FAILED: Final = 1
"""The SLO was missed, an answer was wrong, or `compare` found a regression. (2 is a mistake on the command line.)"""
INVALID: Final = 3
"""The generator was the bottleneck, so that the figures say nothing about the server."""


class LoadTestError(Exception):
    """A test that cannot be run. The message says what, where, got, want."""
