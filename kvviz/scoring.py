"""Task metrics, as RULER and LongBench score: an output and its right answers -> 0 to 100.

Every metric takes the output, the answers and, for classification, all classes. RULER's string matches look at all answers
together; LongBench's metrics compare with each answer and the best one counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

from rapidfuzz import fuzz

Answers = Sequence[str]


def score(metric: str, output: str, answers: Answers, classes: Sequence[str] = (), first_line: bool = False) -> float:
    """How good an output is, from 0 to 100.

    Args:
        metric: a name of METRICS.
        output: what the model wrote after the answer's first words.
        answers: the right ones.
        classes: all class names, for "classification".
        first_line: only the output's first line counts (LongBench's few-shot tasks, where a model writes on and on).

    Raises:
        ValueError: an unknown metric, or no answers.
    """
    if metric not in METRICS:
        raise ValueError(f"There is no metric {metric!r}. All of them: {', '.join(METRICS)}.")
    if not answers:
        raise ValueError("There is no right answer to compare with.")
    if first_line:
        output = output.lstrip("\n").split("\n")[0]
    return 100 * METRICS[metric](output, answers, classes)


def match_all(output: str, answers: Answers, _: Sequence[str] = ()) -> float:
    """RULER: the share of the answers that occur in the output, whatever the case."""
    return sum(answer.lower() in output.lower() for answer in answers) / len(answers)


def match_part(output: str, answers: Answers, _: Sequence[str] = ()) -> float:
    """RULER's question answering: whether one of the answers occurs in the output, whatever the case."""
    return float(any(answer.lower() in output.lower() for answer in answers))


def qa_f1(output: str, answer: str) -> float:
    """LongBench: F1 of the words, without case, punctuation and articles."""
    mine, right = _words(output), _words(answer)
    same = sum((Counter(mine) & Counter(right)).values())
    return 2 * same / (len(mine) + len(right)) if same else 0.0


def rouge_l(output: str, answer: str) -> float:
    """ROUGE-L: F1 of the longest common subsequence of words (rouge-score, no stemming)."""
    return _rouge().score(answer, output)["rougeL"].fmeasure


def edit_similarity(output: str, answer: str) -> float:
    """LongBench's code metric: similarity of the answer with the first line that is neither a comment nor a code fence."""
    lines = output.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return fuzz.ratio(line, answer) / 100


def retrieval(output: str, answer: str) -> float:
    """LongBench: the share of the numbers in the output that are the number in the answer ("Paragraph 7")."""
    return count(output, re.search(r"\d+", answer)[0])


def count(output: str, answer: str) -> float:
    """LongBench: the share of the numbers in the output that are the answer."""
    numbers = re.findall(r"\d+", output)
    return numbers.count(answer.strip()) / len(numbers) if numbers else 0.0


def classification(output: str, answers: Answers, classes: Sequence[str]) -> float:
    """LongBench: 1 / (classes that the output names) if the right one is among them. A class whose name is part of the
    right one's name does not count."""
    return max(_classified(output, answer, classes) for answer in answers)


def _classified(output: str, answer: str, classes: Sequence[str]) -> float:
    named = [each for each in classes if each in output and (each == answer or each not in answer)]
    return 1 / len(named) if answer in named else 0.0


def _best(metric: Callable[[str, str], float]) -> Callable[[str, Answers, Sequence[str]], float]:
    """The best over the answers."""
    return lambda output, answers, _=(): max(metric(output, answer) for answer in answers)


METRICS: dict[str, Callable[[str, Answers, Sequence[str]], float]] = {
    "match_all": match_all,
    "match_part": match_part,
    "qa_f1": _best(qa_f1),
    "rouge_l": _best(rouge_l),
    "edit_similarity": _best(edit_similarity),
    "classification": classification,
    "retrieval": _best(retrieval),
    "count": _best(count),
}


def _words(text: str) -> list[str]:
    plain = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


@cache
def _rouge():
    from rouge_score.rouge_scorer import RougeScorer  # it brings nltk along, which takes a second

    return RougeScorer(["rougeL"], use_stemmer=False)
