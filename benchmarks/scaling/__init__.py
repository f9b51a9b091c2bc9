"""From what one core was measured to do to many machines: the figures of `docs/scaling.md`, and where they come from.

`python -m benchmarks.scaling measure MODELS` finds out what a request, a token, a byte and a refusal cost a real server
on one core; `check MODELS` compares the simulated queue with that server's; `plan` simulates fleets with those costs.
`page` works them into `page.md`, which is the document without its figures. `simulate` is for a reader's own numbers.
"""
