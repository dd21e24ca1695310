"""The command line: what the dashboard does, without a browser. `python -m kvviz generate --help`."""

from __future__ import annotations

import argparse
import sys

from kvviz.commands import bench, generate, models, needle, study, sweep
from kvviz.exceptions import KvvizError

COMMANDS = {"bench": bench, "generate": generate, "models": models, "needle": needle, "study": study, "sweep": sweep}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; 0, or 2 with one line on standard error when the input is at fault."""
    parser = argparse.ArgumentParser(prog="python -m kvviz", description="Watch a language model forget.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.HELP))
    options = parser.parse_args(arguments)
    try:
        COMMANDS[options.command].run(options)
    except (KvvizError, ValueError, OSError) as error:
        print(f"kvviz: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvviz: cancelled", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
