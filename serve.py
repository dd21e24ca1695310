"""Start the dashboard: `python serve.py`, with the options of `streamlit run`. The libraries load while the server starts."""

import gc
import importlib
import sys
import threading
import time
from pathlib import Path

from streamlit.web import cli

FIRST = ("kvviz", "ui")
THEN = ("sklearn.decomposition", "kvviz.studies")
"""What the first page needs, and what the others need besides."""

UNUSED = ("hqq", "scipy")
"""What transformers imports wherever it is installed, though nothing of it is used here: PyTorch's whole compiler comes with hqq.
kvviz imports both by itself where it needs them."""


def libraries() -> None:
    """Import everything, and begin to load the model."""
    gc.disable()  # half a million objects come, and none of them goes
    sys.modules |= dict.fromkeys(UNUSED)
    try:
        for name in FIRST:
            importlib.import_module(name)
    finally:
        for name in UNUSED:
            del sys.modules[name]
        gc.freeze()
        gc.enable()
    importlib.import_module("ui.host").preload()
    time.sleep(3)  # meanwhile the first page is drawn, and the model is loaded
    for name in THEN:
        importlib.import_module(name)


if __name__ == "__main__":
    threading.Thread(target=libraries, daemon=True).start()
    cli.main(["run", str(Path(__file__).with_name("app.py")), *sys.argv[1:]])
