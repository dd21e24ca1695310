"""The eviction methods, one file each.

`names()` lists them, `scorer(name, **options)` makes one, `score(name, key, value, query, ...)` is its
formula on plain tensors. What a policy adds to a scorer (allocation, protection, correction, bits) is in
`kvviz.policies.policy`.
"""

from kvviz.policies.base import Published, Scorer
from kvviz.policies.registry import METHODS, names, options, score, scorer

__all__ = ["METHODS", "Published", "Scorer", "names", "options", "score", "scorer"]
