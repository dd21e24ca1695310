"""Tasks: the asked length, the same for the same seed, the answer in the context, and 100 for the right answer alone."""

import json
import os
import re
import zipfile
from collections import Counter
from random import Random

import pytest

from kvviz import tasks
from kvviz.tasks import TaskError
from kvviz.tasks.fit import TooSmall, largest
from kvviz.tasks.longbench import DATA_SETS
from kvviz.tasks.texts import essays
from kvviz.tasks.world import World
from tests import tiny
from tests.reference import run

LENGTHS = (1600, 4000)
SCORED = [name for name in tasks.names() if name != "text"]
NEEDLES = [name for name in SCORED if name.startswith("niah")]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def plain():
    made = tiny.tokenizer()
    made.chat_template = None
    return made


def test_the_kinds_of_both_collections():
    assert len(tasks.names("RULER")) == 13 and len(tasks.names("LongBench")) == 6
    for name in tasks.names():
        task = tasks.task(name)
        assert task.title and task.measures.endswith(".") and task.kind


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", tasks.names())
def test_the_length_is_the_one_asked_for(tokenizer, name, length):
    for seed in range(3):
        n = tasks.task(name).make(seed, length, tokenizer).tokens(tokenizer)
        assert 0.98 * length <= n <= length


@pytest.mark.parametrize("name", tasks.names())
def test_a_seed_makes_one_example(tokenizer, name):
    task = tasks.task(name)
    assert task.make(5, 1600, tokenizer) == task.make(5, 1600, tokenizer)
    others = [task.make(seed, 1600, tokenizer) for seed in range(5)]
    assert len({example.context for example in others}) == 5
    if name != "text":
        assert len({(example.question, example.answers) for example in others}) > 2


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SCORED)
def test_right_and_wrong_answers(tokenizer, name, length):
    for seed in range(3):
        example = tasks.task(name).make(seed, length, tokenizer)
        assert example.score(" ".join(example.answers)) == 100
        assert example.score("\u2603") == 0
        other = tasks.task(name).make(seed + 50, length, tokenizer)
        if other.answers != example.answers:
            assert example.score(" ".join(other.answers)) < 100


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", [*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2", "single_doc_qa", "multi_doc_qa"])
def test_the_answer_stands_in_the_context(tokenizer, name, length):
    for seed in range(3):
        example = tasks.task(name).make(seed, length, tokenizer)
        assert all(answer in example.context for answer in example.answers)
        assert not any(answer in example.question + example.answer_prefix for answer in example.answers)


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_are_looked_up_by_their_key(tokenizer, name):
    task = tasks.task(name)
    example = task.make(1, 4000, tokenizer)
    found = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", example.context)
    asked = [(key, value) for key, value in found if key in example.question]
    assert sorted(value for _, value in asked) == sorted(example.answers)
    assert len({key for key, _ in asked}) == task.queries
    assert len({value for _, value in found}) == len(found)
    wanted = max(task.keys, task.queries) * task.values
    assert len(found) == wanted if task.haystack != "dense" else len(found) > 20


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needles_stand_where_they_are_put(tokenizer, name, depth):
    example = tasks.task(name, depth=depth).make(0, 4000, tokenizer)
    at = example.context.index(example.answers[0]) / len(example.context)
    assert at == pytest.approx(depth, abs=0.08)


def test_a_needle_is_the_same_at_every_length(tokenizer):
    made = [tasks.task("niah_multikey_1").make(3, n, tokenizer) for n in LENGTHS]
    assert made[0].answers == made[1].answers and made[0].question == made[1].question


def test_a_chain_of_assignments_leads_to_the_value(tokenizer):
    example = tasks.task("vt", chains=2, shots=0).make(0, 3000, tokenizer)
    held = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", example.context))
    asked = re.search(r"\d+", example.question)[0]

    def value(name):
        return value(held[name]) if name in held else name

    assert {name for name in held if value(name) == asked} == set(example.answers)
    assert len(held) == 10


@pytest.mark.parametrize("length", [1600, 6000, 20000])
def test_common_words_are_the_most_common(tokenizer, length):
    example = tasks.task("cwe", shots=0).make(0, length, tokenizer)
    counts = Counter(re.findall(r"\d+\. (\S+)", example.context))
    assert {word for word, _ in counts.most_common(10)} == set(example.answers)
    right = {counts[word] for word in example.answers}
    assert len(right) == 1 and max(n for word, n in counts.items() if word not in example.answers) < min(right)
    if length == 20000:
        assert right == {30} and 3 in counts.values()


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("length", [1600, 4000])
def test_frequent_words_are_the_most_frequent(tokenizer, length, alpha):
    example = tasks.task("fwe", alpha=alpha).make(0, length, tokenizer)
    counts = Counter(re.findall(r"\b[a-z]{6}\b", example.context.split("most often. ")[1]))
    assert [word for word, _ in counts.most_common(3)] == list(example.answers)
    assert len({n for _, n in counts.most_common(4)}) == 4 or len(counts) == 3


def test_a_question_of_two_hops_needs_both_documents():
    story = World(Random(0)).story(0)
    for question, stem, answer in story.two_hops:
        assert story.work.subject in question and story.maker.subject not in question
        assert answer in story.maker.text and answer not in story.work.text + question + stem
        assert story.maker.subject in story.work.text


def test_the_paragraph_that_is_asked_for_is_the_right_one(tokenizer):
    for seed in range(6):
        example = tasks.task("passage_retrieval").make(seed, 4000, tokenizer)
        number = int(re.search(r"\d+", example.answers[0])[0])
        paragraph = re.search(rf"Paragraph {number}: (.*)", example.context)[1]
        abstract = example.question.split("\n\n")[1]
        names = re.findall(r"[A-Z]\w+", abstract.removeprefix("On"))
        assert names and all(name in paragraph for name in names)


def test_a_summary_tells_all_that_was_decided(tokenizer):
    example = tasks.task("summary", decisions=4).make(0, 6000, tokenizer)
    decided = re.findall(r"It was decided to (.*?)\.", example.context)
    assert len(decided) == 4 and all(what in example.answers[0] for what in decided)
    assert "The matter was put off." in example.context


def test_the_next_line_of_code_runs(tokenizer):
    example = tasks.task("code_completion").make(0, 4000, tokenizer)
    source = f"{example.context}{example.question}\n{example.answers[0]}\n"
    defined = {}
    exec(source, defined)
    name = re.search(r"def (\w+)_left\(\w+\):$", example.question)[1]
    constant = re.search(r"return (\w+)", example.answers[0])[1]
    assert defined[f"{name}_left"](3) == defined[constant] - 3
    assert f'"""Counting: {name}."""\n\n{constant} =' in example.context and constant not in example.question


def test_examples_of_a_classification_are_true_to_their_labels(tokenizer):
    example = tasks.task("few_shot_classification").make(0, 4000, tokenizer)
    shown = re.findall(r"Question: (.*)\nType: (\w+)", example.context)
    assert len(shown) > 30 and {label for _, label in shown} == set(example.classes)
    assert example.question not in example.context and not example.chat
    assert all(label == "Quantity" for question, label in shown if question.startswith("How many"))


def test_text_goes_on_with_what_really_follows(tokenizer, tmp_path):
    example = tasks.task("text").make(0, 1500, tokenizer)
    whole = "\n\n".join(essays())
    assert example.continuation[:60] in whole and len(example.continuation.split()) == 96
    assert example.context[-40:] + example.continuation[:40] in whole
    assert example.metric == "" and example.score("x") is None
    assert tasks.task("text", follow="output").make(0, 1500, tokenizer).continuation == ""
    file = tmp_path / "own.txt"
    file.write_text("One two  three.\n\nFour five. " * 60)
    own = tasks.parse(f"text:{file}")
    made = own.make(2, 400, tokenizer)
    assert " ".join((made.context + made.continuation).split()) in " ".join((file.read_text() * 2).split())
    with pytest.raises(TaskError, match="hold"):
        own.make(0, 1500, tokenizer)
    with pytest.raises(TaskError, match="cannot be read"):
        tasks.parse("text:/no/such/file.txt").make(0, 100, tokenizer)
    with pytest.raises(TaskError, match="The essays hold"):
        tasks.task("text").make(0, 200_000, tokenizer)


@pytest.mark.parametrize("name", tasks.names())
def test_without_a_chat_template_the_parts_do_not_run_together(plain, name):
    example = tasks.task(name).make(0, 1600, plain)
    assert not example.chat and example.tokens(plain) <= 1600
    if example.question:
        assert re.search(r"\s$", example.context) or re.match(r"\s", example.question)
    if example.answer_prefix:
        assert example.answer_prefix.startswith(" ")


@pytest.mark.parametrize(
    "text", ["niah_single_2", "niah_multikey_1:keys=8,depth=0.5", "qa_2:hops=1", "fwe:alpha=1.5", "text:words=20"]
)
def test_a_task_as_a_string(text):
    task = tasks.parse(text)
    assert task.spec == text and tasks.parse(task.spec) == task


def test_a_path_with_commas_is_one_option():
    assert tasks.parse("longbench:a, b=c/d.jsonl").source == "a, b=c/d.jsonl"
    task = tasks.parse("text:a, b.txt,words=7")
    assert (task.file, task.words) == ("a, b.txt", 7) and tasks.parse(task.spec) == task


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("niah_simple_2", "niah_single_2"),
        ("niah_single_2:depht=1", "depth"),
        ("niah_single_2:depth=2", "from 0"),
        ("niah_single_2:depth=deep", "not a number"),
        ("niah_single_2:keys=1.5", "whole number"),
        ("niah_single_2:keys=0", "keys"),
        ("niah_single_2:haystack=hay", "repeated, essay, dense"),
        ("few_shot_classification:3", "none"),
        ("cwe:frequency=1", "frequency"),
        ("vt:hops=0", "hops"),
        ("fwe:alpha=9", "alpha"),
        ("qa_1:hops=3", "hops"),
        ("summary:decisions=0", "decisions"),
        ("text:follow=us", "follow"),
    ],
)
def test_bad_tasks_are_refused(text, message):
    with pytest.raises(TaskError, match=message):
        tasks.parse(text)


def test_too_few_tokens_are_refused_with_the_number_that_would_do(tokenizer):
    with pytest.raises(TaskError, match=r"at least [\d,]+ tokens") as error:
        tasks.task("cwe").make(0, 200, tokenizer)
    least = int(re.search(r"at least ([\d,]+)", str(error.value))[1].replace(",", ""))
    assert tasks.task("cwe").make(0, least, tokenizer).tokens(tokenizer) <= least


@pytest.mark.parametrize("limit", [0, 1, 7, 8, 9, 100, 12345])
def test_largest_finds_the_largest_with_few_probes(limit):
    for cost in (lambda n: 3 * n, lambda n: 5 + 2 * n + n // 100, lambda n: n * n):
        probes = []
        counted = lambda n, cost=cost, probes=probes: probes.append(n) or cost(n)  # noqa: E731
        if cost(0) > limit:
            with pytest.raises(TooSmall):
                largest(counted, limit)
            continue
        size = largest(counted, limit)
        assert cost(size) <= limit < cost(size + 1) and len(probes) < 30


def record(**changes):
    return {
        "input": "Who?",
        "context": "Some words. " * 300,
        "answers": ["Ida"],
        "length": 600,
        "dataset": "qasper",
        "language": "en",
        "all_classes": None,
        "_id": "x",
    } | changes


@pytest.fixture
def file(tmp_path):
    """Records -> a file of them."""

    def write(*records):
        path = tmp_path / "records.jsonl"
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
        return tasks.parse(f"longbench:{path}")

    return write


@pytest.mark.parametrize("name", DATA_SETS)
def test_records_of_every_data_set(file, tokenizer, name):
    task = file(record(dataset=name, all_classes=["Ida", "Ivo"], answers=["Ida 3"] if "passage" in name else ["Ida"]))
    example = task.make(0, 10_000, tokenizer)
    assert example.metric == DATA_SETS[name].metric and "Some words. " * 300 in example.context
    assert "{" not in example.context + example.question
    if "report" not in name and "news" not in name and name not in ("lcc", "passage_count"):
        assert "Who?" in example.question
    assert example.score(example.answers[0]) == (0 if name == "passage_count" else 100)


def test_a_long_record_loses_its_middle(file, tokenizer):
    words = " ".join(f"word{i}" for i in range(1000))
    task = file(record(context=words, dataset="multifieldqa_en"))
    example = task.make(0, 1500, tokenizer)
    assert 1497 <= example.tokens(tokenizer) <= 1500
    assert "word0 word1" in example.context and "word998 word999" in example.context
    assert "word500" not in example.context
    with pytest.raises(TaskError, match="at least"):
        task.make(0, 50, tokenizer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is not JSON"),
        ("[1]", "line 2: it is not a JSON object"),
        (record(context=3), "line 2: 'context'"),
        (record(context=" "), "line 2: 'context' is empty"),
        (record(answers="Ida"), "line 2: 'answers'"),
        (record(answers=[]), "line 2: 'answers'"),
        (record(all_classes=[1]), "line 2: 'all_classes'"),
        (record(dataset="trec"), "line 2: 'all_classes' is empty"),
        (record(dataset="vcsum"), "line 2: .* Chinese"),
        (record(dataset="squad"), "line 2: .* unknown"),
    ],
)
def test_broken_records_are_named(file, tokenizer, line, message):
    with pytest.raises(TaskError, match=message):
        file(record(), line).make(0, 5000, tokenizer)


def test_other_faults_of_files(file, tokenizer, tmp_path, monkeypatch):
    with pytest.raises(TaskError, match="no records"):
        file("").make(0, 5000, tokenizer)
    with pytest.raises(TaskError, match="numbered from 0"):
        file(record(), record()).make(2, 5000, tokenizer)
    with pytest.raises(TaskError, match="neither a file nor a data set"):
        tasks.parse("longbench:nothing").make(0, 5000, tokenizer)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match="UTF-8"):
        tasks.parse(f"longbench:{tmp_path / 'bytes.jsonl'}").make(0, 5000, tokenizer)


def test_the_hub(tokenizer, tmp_path, monkeypatch):
    with pytest.raises(TaskError, match=r"Connect .*data\.zip"):  # tests run offline
        tasks.parse("longbench:qasper").make(0, 5000, tokenizer)
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("data/qasper.jsonl", json.dumps(record()) + "\n")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, **k: str(archive))
    assert tasks.parse("longbench:qasper").make(0, 5000, tokenizer).answers == ("Ida",)


def test_a_file_that_was_changed_is_read_again(file, tokenizer):
    assert file(record()).make(0, 5000, tokenizer).answers == ("Ida",)
    task = file(record(answers=["Ivo"]))
    os.utime(task.source, ns=(1, 1))
    assert task.make(0, 5000, tokenizer).answers == ("Ivo",)


@pytest.mark.model
@pytest.mark.parametrize("name", tasks.names())
def test_lengths_with_a_real_tokenizer(default_engine, name):
    tokenizer = default_engine.tokenizer
    for length in (700, 2048):
        n = tasks.task(name).make(0, length, tokenizer).tokens(tokenizer)
        assert 0.98 * length <= n <= length


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_finds_needles(default_engine):
    right = 0
    for seed in range(3):
        example = tasks.task("niah_single_2").make(seed, 480, default_engine.tokenizer)
        state = example.prompt().prefill(default_engine)
        assert 470 <= example.tokens(default_engine.tokenizer) <= 480
        out = run(default_engine, state, example.question, [], 1, max_new_tokens=12, answer=example.answer_prefix)
        right += example.score(out.reference.text) == 100
    assert right == 3
