"""Start the dashboard: `python serve.py`, with the options of `streamlit run`. The libraries load while the server starts."""

import importlib
import sys
import threading
from pathlib import Path

from streamlit.web import cli

if __name__ == "__main__":
    threading.Thread(target=importlib.import_module, args=("kvviz",), daemon=True).start()
    cli.main(["run", str(Path(__file__).with_name("app.py")), *sys.argv[1:]])
