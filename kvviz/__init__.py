"""kvviz: watch a language model forget. Real generation under KV-cache eviction, side by side.

The three stages, for use without the dashboard:

    import kvviz
    engine = kvviz.load()
    state = engine.prefill("A long text ...")
    kept = engine.evict(state, kvviz.policy("capkv", tau=5.0), budget=256)
    for event in engine.generate(state, "A question?", [kvviz.policy("momentkv")], budget=256): ...
"""

from kvviz import capacity, errors, moments, policies
from kvviz.engine import Engine, load
from kvviz.exceptions import Cancelled, KvvizError, OutOfMemory
from kvviz.policies.policy import Policy, policy

__all__ = [
    "Cancelled",
    "Engine",
    "KvvizError",
    "OutOfMemory",
    "Policy",
    "capacity",
    "errors",
    "load",
    "moments",
    "policies",
    "policy",
]
