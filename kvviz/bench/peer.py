"""The peer, kvpress, in a process with an environment of its own; it holds the same model and prompt and runs when asked."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from kvviz.exceptions import KvvizError

POLICIES = ("sink", "knorm", "keydiff", "expected_attention", "snapkv", "tova", "adakv", "random")
"""The eight policies of the sweep. (kvpress 0.5.5 cannot decode PyramidKV's layers of unequal length without Flash Attention.)"""


class Peer:
    """kvpress behind a pipe.

    Args:
        python: the peer's Python, with kvpress installed.
        folder: the model's folder of safetensors.
        context, question: the prompt.
        threads: CPU threads, as many as ours.
    """

    def __init__(self, python: str, folder: str, context: str, question: str, threads: int) -> None:
        worker = Path(__file__).with_name("peer_worker.py")
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._ask({"folder": folder, "context": context, "question": question, "threads": threads})

    def run(self, policy: str, ratio: float, max_new_tokens: int) -> float:
        """Seconds of one whole run: prefill, eviction, question, answer."""
        return self._ask({"policy": policy, "ratio": ratio, "max_new_tokens": max_new_tokens})["seconds"]

    def _ask(self, request: dict) -> dict:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise KvvizError("The peer ended. Is kvpress 0.5.5 installed in the Python that --peer names?")
        answer = json.loads(answer)
        if "error" in answer:
            raise KvvizError(f"The peer failed: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(timeout=60)
