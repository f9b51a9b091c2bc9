"""See the heads of an attention layer, rank them by what they contribute, and prune those that contribute least.

`heads.cli` is the command line; everything else computes on torch layers and on files.
"""
