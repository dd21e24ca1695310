"""Benchmarks: `make bench`. Ratios measured in one run on one machine, the peer (kvpress) in turn with us.

timing.py      repeats, interleaving, median and spread
targets.py     what is measured, and what must be reached
measures.py    the measurements on our side
peer.py        the peer in an environment of its own: our end of it
peer_worker.py the other end, run by the peer's Python
growth.py      how cost grows with tokens and rows, beside the floor of memory bandwidth
memory.py      peak memory of a run, in a process of its own
report.py      the table as Markdown and JSON
"""
