"""`python -m kvviz models`: what can be loaded."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from kvviz.models import available, supported_families

HELP = "List models that can be loaded, and the supported families."


def add_arguments(parser: ArgumentParser) -> None:
    """No options."""


def run(options: Namespace) -> None:
    """Print names with a line on each."""
    for model in available():
        print(f"{model['name']:34} {model['description']}")
    print("\nAny Hugging Face id, local folder or .gguf file of these families can be loaded as well:")
    for family, covers in supported_families().items():
        print(f"{family:34} {covers}")
