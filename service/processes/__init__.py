"""Several processes behind one port: a parent that deals out connections, and the children that serve them.

Python does one thing at a time beside its engine calls, so several CPUs want several processes. They share
a page of numbers (`board`) and what was measured at the start (`notebook`); for the rest the parent passes messages on
(`parent`, `sibling`). Imports nothing of the service but its errors. Linux only; a child is a fork, made before any
thread is.
"""
