"""Experiments, budgets in three units, and links: what a link says comes back, and what makes no sense is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kvviz
from kvviz.experiment import (
    ENTRIES,
    MAX_POLICIES,
    MIB,
    OWN,
    PARAMETERS,
    SHARE,
    Experiment,
    Shape,
    Size,
    from_query,
    to_query,
)
from kvviz.host import ModelSpec
from kvviz.jobs import Prompt
from kvviz.presets import PRESETS

SMOLLM = Shape(layers=30, heads=9, kv_heads=3, head_dim=64, itemsize=4, positions=8192, all_layers=30)


def as_link(experiment: Experiment) -> dict[str, list[str]]:
    return {key: value if isinstance(value, list) else [value] for key, value in to_query(experiment).items()}


def test_the_usual_experiment_has_a_short_link():
    assert to_query(Experiment()) == {"preset": "needle"}


CHANGED = [
    {"preset": "code", "prompt": PRESETS["code"].prompt()},
    {"prompt": replace(PRESETS["needle"].prompt(seen=True), question="A question?", answer="", chat=False)},
    {"chosen": (kvviz.policy("sink"), kvviz.policy("capkv"), kvviz.policy("capkv", tau=0.5, variant="paper"))},
    {"chosen": (kvviz.policy("momentkv", partition=0.5, order_of_eviction="one batch", correction=None),)},
    {"chosen": ()},
    {"size": Size(82.5, SHARE), "equal": (4, 32)},
    {"size": Size(5.6, MIB), "model": ModelSpec("Qwen/Qwen3-8B", "cuda:1", "bf16")},
    {"size": Size(512), "policy_index": 1, "layer": 12, "head": 7},
    {"max_new_tokens": 128, "temperature": 0.7, "seed": 11},
]


@pytest.mark.parametrize("changes", CHANGED, ids=lambda changes: ",".join(changes))
def test_a_link_opens_the_same_experiment(changes):
    experiment = replace(Experiment(), **changes)
    assert set(to_query(experiment)) <= set(PARAMETERS)
    assert from_query(as_link(experiment), Experiment()) == (experiment, [])


def test_every_policy_survives_the_link():
    for name in kvviz.policies.names():
        if name != "full":
            experiment = replace(Experiment(), chosen=(kvviz.policy(name),))
            assert from_query(as_link(experiment), Experiment())[0].chosen == experiment.chosen


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("preset", "<script>"),
        ("budget", "0"),
        ("budget", "-5"),
        ("budget", "1e999"),
        ("budget", "nan"),
        ("budget", "100%"),
        ("budget", "0MiB"),
        ("policies", "capkv:tau=-1"),
        ("policies", "capkv:tau=nan"),
        ("policies", "capkv:tau"),
        ("policies", "nothing"),
        ("protect", "4"),
        ("protect", "a,b"),
        ("tokens", "0"),
        ("tokens", "100000"),
        ("temperature", "nan"),
        ("temperature", "-1"),
        ("seed", "x"),
        ("layer", "-1"),
        ("seen", "maybe"),
        ("question", "x" * 5000),
    ],
)
def test_nonsense_in_a_link_is_ignored_with_a_note(key, value):
    made, notes = from_query({key: [value]}, Experiment())
    assert made == Experiment()
    assert len(notes) == 1 and key in notes[0] and "ignored" in notes[0]
    assert len(notes[0]) < 600


def test_a_text_of_ones_own_is_not_in_the_link():
    own = replace(Experiment(), preset=OWN, prompt=Prompt("A secret text.", "What?"))
    assert "secret" not in str(to_query(own))
    made, notes = from_query(as_link(own), Experiment())
    assert made.prompt.context == "" and "not in it" in notes[0]
    assert "empty" in made.fault
    assert from_query(as_link(own), own) == (own, [])


def test_more_policies_than_fit():
    made, notes = from_query({"policies": [f"capkv:tau={n}" for n in range(19)]}, Experiment())
    assert len(made.chosen) == MAX_POLICIES and f"first {MAX_POLICIES}" in notes[0]


@pytest.mark.parametrize("entries", [1, 64, 256, 1000, 1372])
def test_units_agree(entries):
    n = 1372
    for unit in (SHARE, MIB):
        size = Size.of(entries, unit, n, SMOLLM)
        assert abs(size.entries(n, SMOLLM) - entries) <= max(2, 0.02 * entries)
        assert Size.parse(str(size)) == size
    assert Size(entries).to(ENTRIES, n, SMOLLM) == Size(entries)


def test_bytes_count_the_moment_statistics():
    size = Size(SMOLLM.bytes(256) / 2**20, MIB)
    plain, moments = kvviz.policy("capkv"), kvviz.policy("momentkv")
    assert size.entries(2000, SMOLLM, plain) == 256
    own = (64 * 64 + 2 * 64 + 1) * 4 / (2 * 64 * 4)
    assert size.entries(2000, SMOLLM, moments) == int(256 - own)


def test_a_budget_needs_a_model_only_for_shares_and_bytes():
    assert Experiment(size=Size(64)).budget == 64
    assert Experiment(size=Size(50, SHARE)).budget == 256
    assert Experiment(size=Size(50, SHARE), n_tokens=1000, shape=SMOLLM).budget == 500


def test_equal_protection_holds_for_all_and_doubles_go():
    experiment = Experiment(chosen=(kvviz.policy("capkv"), kvviz.policy("capkv"), kvviz.policy("snapkv")), equal=(2, 8))
    assert [(p.name, p.sinks, p.recent) for p in experiment.policies] == [("capkv", 2, 8), ("snapkv", 2, 8)]
    assert experiment.chosen[0].sinks == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": Prompt("  ")}, "empty"),
        ({"prompt": Prompt("Text.", "")}, "question is empty"),
        ({"chosen": ()}, "No policy"),
        ({"n_tokens": 9000, "shape": SMOLLM}, "9,000 tokens. With 48 new ones at most 8,144"),
        ({"n_tokens": 1000, "shape": SMOLLM, "size": Size(0.5, MIB)}, "MomentKV needs at least"),
    ],
)
def test_faults_say_what_to_do(changes, words):
    assert words in replace(Experiment(), **changes).fault


def test_the_usual_experiment_has_no_fault():
    assert Experiment(n_tokens=1372, shape=SMOLLM).fault == ""
    assert replace(Experiment(), preset="essay", prompt=PRESETS["essay"].prompt()).fault == ""


def test_words():
    words = Experiment(n_tokens=1372, shape=SMOLLM).words()
    assert words == (
        "SmolLM2-135M-Instruct, Needle in a licence, 1,372 tokens, budget 256 entries a head, question asked after eviction"
    )
