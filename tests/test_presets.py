"""The six presets: there, of the right length, and answered by the default model from the full cache."""

from __future__ import annotations

import pytest

from kvviz.events import Finished
from kvviz.presets import PRESETS

ANSWERS = {
    "needle": "60494",
    "story": "Pepper",
    "harbour": "Prague brings wool and lies at berth 33",
    "reviews": "negative",
    "code": "return days * SECONDS_PER_DAY",
    "essay": "the river is made",
}


def test_there_are_six():
    assert set(PRESETS) == set(ANSWERS)
    for preset in PRESETS.values():
        assert preset.title and preset.shows.endswith(("?", "."))
        assert "\x00" not in preset.context and preset.context.strip()
        assert preset.chat is False or preset.question


def test_the_answers_lie_in_the_texts():
    assert "The special magic number for Cairo is 60494." in PRESETS["needle"].context
    assert "The Falcon from Prague brings wool and lies at berth 33." in PRESETS["harbour"].context
    assert PRESETS["code"].context.count("SECONDS_PER_DAY") == 1


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_the_default_model_answers(default_engine, name):
    prompt = PRESETS[name].prompt()
    state = prompt.prefill(default_engine)
    assert 500 <= state.n_tokens <= 2000
    events = default_engine.generate(state, prompt.question, [], 256, 24, answer=prompt.answer)
    (run,) = [event.run for event in events if isinstance(event, Finished)]
    assert ANSWERS[name] in run.reference.text
