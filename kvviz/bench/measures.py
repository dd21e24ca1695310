"""The measurements behind the table: each gives {key: (value in the target's unit, spread as a share, what was measured)}."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import kvviz
from kvviz import analysis
from kvviz.bench.memory import peak_ratio
from kvviz.bench.peer import POLICIES
from kvviz.bench.setting import Setting
from kvviz.bench.timing import Times, in_turn, once, ratio
from kvviz.cache import RowCache
from kvviz.decode import decode, forward
from kvviz.evict import evict, score_layers
from kvviz.figures import capacity as capacity_figures
from kvviz.figures import style
from kvviz.figures import values as values_figures
from kvviz.figures.angle import angle
from kvviz.policies import METHODS
from kvviz.prefill import prefill

Result = dict[str, tuple[float, float, dict]]

BUDGETS = (128, 256, 512, 1024)


def peer_runs(setting: Setting) -> Result:
    """The sweep and one run, in turn with kvpress."""
    if setting.peer is None:
        return {}
    peer, n = setting.peer, setting.n_tokens
    policies = [kvviz.policy(p) for p in POLICIES for _ in BUDGETS]

    def sweep() -> None:
        setting.engine.forget()
        state = setting.prompt.prefill(setting.engine)
        budgets, length = list(BUDGETS) * len(POLICIES), setting.new_tokens
        for _ in setting.engine.generate(
            state, setting.prompt.question, policies, budgets, length, stop=False, compare=False
        ):
            pass

    ours = Times(tuple(once(sweep) for _ in range(2)))
    theirs = sum(peer.run(p, 1 - b / n, setting.new_tokens) for p in POLICIES for b in BUDGETS)
    result = {"sweep": (theirs / ours.median, ours.spread, {"sweep: kvviz s": ours.median, "sweep: kvpress s": theirs})}
    times = in_turn(
        {"kvviz": lambda: one_policy(setting), "kvpress": lambda: peer.run("snapkv", 1 - 256 / n, setting.new_tokens)},
        setting.repeats,
    )
    faster, spread = ratio(times["kvpress"], times["kvviz"])
    result["end_to_end"] = (faster, spread, {f"one run: {name} s": t.median for name, t in times.items()})
    return result


def one_policy(setting: Setting) -> None:
    """SnapKV alone: prefill, evict, question, answer."""
    model = setting.engine.model
    state = prefill(model, setting.ids)
    kept = evict(state, kvviz.policy("snapkv"), 256)
    cache = RowCache([kept], len(setting.follow) + setting.new_tokens)
    for _ in decode(model, cache, setting.follow, state.logits, max_new_tokens=setting.new_tokens, eos=frozenset()):
        pass


def decoding(setting: Setting) -> Result:
    """Lockstep, the correction, and decoding against transformers."""
    state, engine = setting.state, setting.engine
    names = ("snapkv", "capkv", "keydiff", "sink")
    kept = {name: evict(state, kvviz.policy(name), 256) for name in names}
    corrected = evict(state, kvviz.policy("snapkv", correction=1), 256)
    logging.disable_progress_bar()
    plain = (
        AutoModelForCausalLM.from_pretrained(setting.folder, dtype=engine.loaded.dtype).to(engine.loaded.device).eval()
    )
    prompt = torch.tensor([setting.ids], device=engine.loaded.device)

    def steps(rows) -> Callable[[], None]:
        """Seconds of new tokens read one by one by these rows, after one that does not count."""

        def run() -> float:
            cache, tokens = (
                RowCache(rows, setting.new_tokens + 2),
                torch.full((len(rows), 1), 5, device=engine.loaded.device),
            )
            forward(engine.model, cache, tokens)
            return once(lambda: [forward(engine.model, cache, tokens) for _ in range(setting.new_tokens)])

        return run

    def generate() -> float:
        def write(n: int) -> float:
            return once(lambda: plain.generate(prompt, max_new_tokens=n, min_new_tokens=n, do_sample=False))

        return write(setting.new_tokens + 1) - write(1)

    times = in_turn(
        {
            "one": steps([kept["snapkv"]]),
            "four": steps(list(kept.values())),
            "corrected": steps([corrected]),
            "generate": generate,
        },
        setting.repeats,
    )
    pairs = {"lockstep": ("four", "one"), "correction": ("corrected", "one"), "decode": ("generate", "one")}
    per_token = {f"{name} ms/token": 1000 * t.median / setting.new_tokens for name, t in times.items()}
    return {key: (*ratio(times[a], times[b]), per_token) for key, (a, b) in pairs.items()}


def eviction(setting: Setting) -> Result:
    """Prefill, with and without what is captured, and the evictions against it."""
    model, ids, state = setting.engine.model, setting.ids, setting.state
    tokens = torch.tensor([ids], device=model.device)

    def plain() -> None:
        with torch.no_grad():
            model(tokens, use_cache=True, logits_to_keep=1)

    times = in_turn(
        {
            "plain": plain,
            "prefill": lambda: prefill(model, ids),
            "mass": lambda: prefill(model, ids, want_mass=True),
            "capkv": lambda: evict(state, kvviz.policy("capkv"), 256),
            "rounds": lambda: evict(state, kvviz.policy("momentkv"), 256),
        },
        setting.repeats,
    )
    parts = {f"{name} s": t.median for name, t in times.items()}
    result = {}
    for key, numerator, denominator, base in (
        ("capture", "prefill", "plain", 1),
        ("mass", "mass", "prefill", 1),
        ("capkv", "capkv", "prefill", 0),
        ("rounds", "rounds", "prefill", 0),
    ):
        value, spread = ratio(times[numerator], times[denominator])
        result[key] = (100 * (value - base), spread, parts)
    sequential = kvviz.policy("momentkv", order_of_eviction="sequential", block=1)
    result["sequential"] = (
        once(lambda: evict(state, sequential, 256)),
        0.0,
        {"entries evicted a head": len(ids) - 256},
    )
    return result


def methods(setting: Setting) -> Result:
    """Eviction to 256 entries by every method that needs no run before it, and start-up with and without the converted model."""
    state = prefill(setting.engine.model, setting.ids, want_mass=True)
    seconds = {
        f"{name}: eviction s": once(lambda n=name: evict(state, kvviz.policy(n), 256))
        for name, method in METHODS.items()
        if "probes" not in method.needs
    }
    return {"methods": (sum(seconds.values()), 0.0, seconds)}


def starts(setting: Setting) -> Result:
    """Import and load in a fresh process: with the default model converted before, and with an empty cache."""
    code = "from time import perf_counter as t; a = t(); import kvviz; b = t(); kvviz.load(%r); print(b - a, t() - b)"
    command, parts = [sys.executable, "-c", code % setting.spec.name], {}
    with tempfile.TemporaryDirectory() as empty:
        for name, more in (("warm", {}), ("cold", {"KVVIZ_CACHE": empty})):
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | more)
            imported, loaded = map(float, done.stdout.split()[-2:])
            parts |= {f"{name} start, import s": imported, f"{name} start, load s": loaded}
    return {"starts": (sum(parts.values()), 0.0, parts)}


def sliders(setting: Setting) -> Result:
    """From the cached state to finished figures: a new budget on Values, a new tau on Capacity."""
    numbers, chosen, facts = analysis.of(setting.state), kvviz.policy("capkv"), setting.engine.loaded
    layer, head, kv_head = facts.n_layers // 2, facts.n_heads // 2, facts.n_kv_heads // 2
    score_layers(setting.state, chosen)
    budgets, taus = iter(range(257, 2000)), iter(range(1, 2000))

    def move_budget() -> None:
        view = numbers.head(chosen, next(budgets), layer, head)
        style.bake(values_figures.plane(view)).to_json()
        angle(view)

    def move_tau() -> None:
        policies = [kvviz.policy("capkv", tau=next(taus) / 100), kvviz.policy("snapkv")]
        curves = numbers.head_capacity(policies, analysis.SHARES, layer, kv_head)
        for which in analysis.CAPACITIES:
            style.bake(capacity_figures.curve(curves, which, 0.5)).to_json()

    times = in_turn({"slider_values": move_budget, "slider_capacity": move_tau}, max(5, setting.repeats))
    return {key: (1000 * t.median, t.spread, {}) for key, t in times.items()}


def memory(setting: Setting) -> Result:
    """Bytes kept against 2 L Hkv kept d itemsize, and the peak of a run."""
    worst, facts = 0.0, setting.engine.loaded
    for name in ("snapkv", "adakv", "pyramidkv", "capkv"):
        kept = evict(setting.state, kvviz.policy(name), 256)
        stored = sum(t.untyped_storage().nbytes() for layer in kept.layers for t in (layer.keys, layer.values))
        formula = 2 * facts.n_layers * facts.n_kv_heads * 256 * facts.head_dim * facts.dtype.itemsize
        worst = max(worst, abs(stored / formula - 1))
    result = {"bytes": (100 * worst, 0.0, {"KiB": stored / 1024})}
    if facts.device.type == "cpu":
        value, parts = peak_ratio(setting.context_file, setting.prompt.question, setting.spec.name)
        result["peak"] = (value, 0.0, {f"{name} MiB": size / 2**20 for name, size in parts.items()})
    return result


ALL = (eviction, methods, decoding, sliders, starts, memory, peer_runs)
