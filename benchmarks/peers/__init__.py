"""The service against its peers, on the same graph with the same session options: `make bench`.

Each peer is a script in `servers/` with an environment of its own (`requirements/`, installed below `.bench/`), written
as its documentation asks and tuned; it gets the fastest body that it accepts, and of several setups the best one for
each workload. The driver starts them all, stops every process but those that it measures (SIGSTOP), and takes turns
among them in each round, because such machines are shared: the claims are ratios within a round, not seconds.
"""
