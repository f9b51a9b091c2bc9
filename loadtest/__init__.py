"""`mha loadtest`: a load generator that knows attention, times from when a request was due, and says when it lies.

Talks HTTP only and never imports the service, so that what it says holds for any server. docs/loadtest.md says what
each figure means.
"""
