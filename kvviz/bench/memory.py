"""Peak memory of a run, in a process of its own: `python -m kvviz.bench.memory CONTEXT QUESTION`. Linux only."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path


def peak_ratio(context: Path, question: str, model: str) -> tuple[float, dict]:
    """Peak resident memory of a run above that of a bare process, over weights + full KV of the prompt; and the parts."""
    command = [sys.executable, "-m", "kvviz.bench.memory", str(context), question, model]
    parts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return (parts["peak"] - parts["bare"]) / (parts["weights"] + parts["kv"]), parts


def _status(name: str) -> int:
    """A memory figure of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Load, forget the peak of loading, run three policies, print the figures as JSON."""
    import kvviz
    from kvviz.host import ModelSpec
    from kvviz.jobs import Generate, Prompt

    context, question, name = sys.argv[1:4]
    bare = _status("VmRSS")
    engine = kvviz.load(name, device="cpu")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # start the peak anew
    policies = tuple(kvviz.policy(p) for p in ("capkv", "momentkv", "snapkv"))
    request = Generate(ModelSpec(name), Prompt(Path(context).read_text(), question), policies, 256, max_new_tokens=32)
    list(request.run(engine, lambda share, text: None))
    state = next(iter(engine._states.values()))
    weights = engine.loaded.parameters * 4
    print(json.dumps({"bare": bare, "peak": _status("VmHWM"), "weights": weights, "kv": state.bytes}))


if __name__ == "__main__":
    main()
