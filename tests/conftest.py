"""Fixtures: engines on tiny random models (all fast tests), and one on the default model (marked `model`)."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

import kvviz
from tests import tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """family -> a folder with a tiny random model of it, as a person would have on disk."""
    made = {}

    def folder(family: str = "llama") -> str:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            tiny.model(family).save_pretrained(path)
            tiny.tokenizer().save_pretrained(path)
            made[family] = str(path)
        return made[family]

    return folder


@pytest.fixture(scope="session")
def tiny_engine(tiny_folder):
    """family -> an engine on a tiny random model; shared, so tests leave it as it was."""
    made = {}

    def engine(family: str = "llama") -> kvviz.Engine:
        if family not in made:
            made[family] = kvviz.load(tiny_folder(family), device="cpu")
        return made[family]

    return engine


@pytest.fixture
def engine(tiny_engine):
    """The tiny Llama."""
    return tiny_engine("llama")


@pytest.fixture(scope="session")
def default_engine():
    """The default model; tests that use it carry the marker `model`."""
    return kvviz.load(device="cpu")
