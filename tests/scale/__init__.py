"""The service on a real Ray cluster of two nodes, on one machine: `make test-scale`.

Every answer is compared with the oracle, and every request that was sent is accounted for.
"""
