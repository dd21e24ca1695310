"""The benchmark's results as a Markdown table and as JSON."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import torch

from kvviz.bench.growth import exponent
from kvviz.bench.targets import TARGETS
from kvviz.engine import Engine


def machine(engine: Engine) -> dict:
    """Where it ran."""
    loaded = engine.loaded
    return {
        "model": loaded.name,
        "device": torch.cuda.get_device_name() if loaded.device.type == "cuda" else platform.machine() + " CPU",
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        **{name: version(name) for name in ("torch", "transformers")},
    }


def table(results: dict) -> str:
    """The main table."""
    lines = ["| what | measured | must reach | hoped for | |", "| --- | --- | --- | --- | --- |"]
    for target in TARGETS:
        if target.key not in results:
            continue
        value, spread, _ = results[target.key]
        sign = "at least" if target.more else "at most"
        shown = f"{value:.{target.digits}f} {target.unit}" + (f" (± {spread:.0%})" if spread else "")
        verdict = "reached" if target.reached(value) else "**missed**"
        lines.append(f"| {target.what} | {shown} | {sign} {target.must:g} | {target.hoped:g} | {verdict} |")
    return "\n".join(lines)


def parts(results: dict) -> str:
    """The absolute figures behind the ratios."""
    seen, lines = set(), ["| figure | |", "| --- | --- |"]
    for _, _, details in results.values():
        for name, value in details.items():
            if (name, value) not in seen:
                seen.add((name, value))
                lines.append(f"| {name} | {value:.4g} |")
    return "\n".join(lines)


def growth_tables(lengths: list[dict], rows: list[dict]) -> str:
    """Growth with tokens and rows, the floor beside it."""
    out = [
        "| tokens | prefill s | of its floor | CapKV's eviction s | decode step ms, full cache | of its floor |",
        "| --- " * 6 + "|",
    ]
    for r in lengths:
        out.append(
            f"| {r['tokens']:,} | {r['prefill']:.2f} | {r['prefill_floor'] / r['prefill']:.0%} | {r['evict']:.3f} | "
            f"{1000 * r['step']:.1f} | {r['step_floor'] / r['step']:.0%} |"
        )
    fitted = ", ".join(f"{name} {exponent(lengths, 'tokens', name):.2f}" for name in ("prefill", "evict", "step"))
    out += [
        "",
        f"Fitted exponents: {fitted}.",
        "",
        "| rows at budget 256 | decode step ms | of its floor |",
        "| --- " * 3 + "|",
    ]
    out += [f"| {r['rows']} | {1000 * r['step']:.1f} | {r['step_floor'] / r['step']:.0%} |" for r in rows]
    out += ["", f"Fitted exponent: {exponent(rows, 'rows', 'step'):.2f}."]
    return "\n".join(out)


def profile_table(profiles: dict[str, dict[str, float]]) -> str:
    """Where the time goes, in percent."""
    kinds = list(next(iter(profiles.values())))
    lines = [f"| share of the time | {' | '.join(kinds)} |", "| --- " * (len(kinds) + 1) + "|"]
    lines += [
        f"| {name} | " + " | ".join(f"{found[kind]:.0%}" for kind in kinds) + " |" for name, found in profiles.items()
    ]
    return "\n".join(lines)
