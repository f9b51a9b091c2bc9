"""The service against its peers, on the same graph with the same session options: `make bench`.

Each peer is a script in `servers/` with an environment of its own (`requirements/`, installed below `.bench/`), written
as its documentation asks and tuned; it gets the fastest body that it accepts, and of several setups the best one for
each workload. The driver starts them all and takes turns among them in each round, because such machines are shared:
the claims are ratios within a round, not seconds. Those that poll are stopped (SIGSTOP) out of their turn, and what CPU
the others take while they wait is written down beside each figure.
"""
