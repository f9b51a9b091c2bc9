"""Where the results of a run are kept."""

from typing import Final

from benchmarks.peers.contestants import ROOT

RESULTS: Final = ROOT / "benchmarks" / "results" / "peers.json"
