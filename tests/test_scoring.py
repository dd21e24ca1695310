"""Metrics against values worked out by hand."""

import pytest

from kvviz import scoring
from kvviz.scoring import score


@pytest.mark.parametrize(
    ("metric", "output", "answers", "expected"),
    [
        ("match_all", " 7361904.", ["7361904"], 100),
        ("match_all", "first 11, then Two", ["11", "two", "33", "44"], 50),
        ("match_all", "no", ["11"], 0),
        ("match_part", "It was played on the ZITHER", ["lute", "zither"], 100),
        ("match_part", "", ["lute"], 0),
        ("qa_f1", "The town of Holholm!", ["Holholm"], 100 * 2 * 1 / (3 + 1)),
        ("qa_f1", "a holholm", ["Holholm", "Norstead"], 100),
        ("qa_f1", "an owl, an owl", ["one owl"], 100 * 2 * 1 / (2 + 2)),
        ("qa_f1", "", ["owl"], 0),
        ("qa_f1", "the", ["a"], 0),
        # longest common subsequence "the cat on the mat": 5 words of 6 and of 6
        ("rouge_l", "the cat lay on the mat", ["the cat on a the mat"], 100 * 2 * 5 / 12),
        ("rouge_l", "cat mat", ["the cat sat on the mat"], 100 * 2 * 2 / 8),
        ("rouge_l", "rain", ["sun", "rain"], 100),
        ("rouge_l", "", ["sun"], 0),
        # indel similarity: 2 * common / total
        ("edit_similarity", "\n# a comment\nreturn a\nreturn b", ["return a"], 100),
        ("edit_similarity", "abcd", ["abxd"], 100 * 6 / 8),
        ("edit_similarity", "# only a comment", ["x"], 0),
        ("retrieval", "Paragraph 7, not 8", ["Paragraph 7"], 50),
        ("retrieval", " 7.", ["Paragraph 7"], 100),
        ("retrieval", "Paragraph 17", ["Paragraph 7"], 0),
        ("retrieval", "none", ["Paragraph 7"], 0),
        ("count", "The number is 12", ["12"], 100),
        ("count", "12 or 13 or 14", ["12"], 100 / 3),
        ("count", "twelve", ["12"], 0),
    ],
)
def test_values(metric, output, answers, expected):
    assert score(metric, output, answers) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("output", "answer", "expected"),
    [
        (" Person", "Person", 100),
        ("Person or Place", "Person", 50),
        ("Place", "Person", 0),
        ("", "Person", 0),
        ("Abbreviation expansion", "Abbreviation expansion", 100),  # the shorter name inside it does not count
        ("Abbreviation", "Abbreviation", 100),
    ],
)
def test_classification(output, answer, expected):
    classes = ("Person", "Place", "Abbreviation", "Abbreviation expansion")
    assert score("classification", output, [answer], classes) == pytest.approx(expected)


def test_only_the_first_line_where_a_model_writes_on():
    output = "\n Person\nQuestion: Where?\nType: Place"
    assert score("classification", output, ["Person"], ("Person", "Place")) == 50
    assert score("classification", output, ["Person"], ("Person", "Place"), first_line=True) == 100


@pytest.mark.parametrize("metric", scoring.METRICS)
def test_from_0_to_100(metric):
    right = {"retrieval": "Paragraph 3", "count": "3"}.get(metric, "x = 3")
    assert score(metric, right, [right], (right,)) == 100
    assert score(metric, "\u2603", [right], (right,)) == 0


def test_bad_calls_are_refused():
    with pytest.raises(ValueError, match="qa_f1"):
        score("f1", "a", ["a"])
    with pytest.raises(ValueError, match="no right answer"):
        score("qa_f1", "a", [])
