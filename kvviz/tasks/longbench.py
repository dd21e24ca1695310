"""LongBench's own data: files in its JSONL form, from disk or from the hub, each record with the metric of its data set.

A record is one line with `context`, `input`, `answers`, `all_classes` and `dataset` (`_id` and `length` are not needed). The
instructions around a record are ours, of the same form as LongBench's. A context that is too long loses its middle, as there.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import huggingface_hub

from kvviz.tasks.fit import TooSmall, largest
from kvviz.tasks.task import Draft, Draw, Example, Task, TaskError

HUB = "THUDM/LongBench"
_ARCHIVE = "data.zip"


@dataclass(frozen=True)
class DataSet:
    """How records of one data set are asked and scored; `lead` stands before the context, `question` after it."""

    metric: str
    max_new_tokens: int
    lead: str
    question: str
    chat: bool = True
    first_line: bool = False


_SHORT = "Give only the answer and no other words."
_PASSAGES = DataSet(
    "qa_f1",
    32,
    f"Answer the question from the passages. {_SHORT}\n\n",
    f"Answer the question from the passages above. {_SHORT}\n\nQuestion: {{input}}\nAnswer:",
)
_ARTICLE = (
    "Answer the question from the article, in as few words as you can. If the article does not answer it, write "
    '"unanswerable"; if it is a yes or no question, write "yes" or "no".'
)

DATA_SETS: dict[str, DataSet] = {
    "narrativeqa": DataSet(
        "qa_f1",
        128,
        "Here is a story, and after it a question. Answer in as few words as you can.\n\nStory: ",
        "Answer the question from the story, in as few words as you can, without explaining.\n\nQuestion: {input}\n\nAnswer:",
    ),
    "qasper": DataSet("qa_f1", 128, f"{_ARTICLE}\n\nArticle: ", f"{_ARTICLE}\n\nQuestion: {{input}}\n\nAnswer:"),
    "multifieldqa_en": DataSet(
        "qa_f1",
        64,
        "Read the text and answer briefly.\n\n",
        f"Answer the question from the text above. {_SHORT}\n\nQuestion: {{input}}\nAnswer:",
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "gov_report": DataSet(
        "rouge_l",
        512,
        "Here is a report by a government agency. Write a summary of one page.\n\nReport:\n",
        "Now write a summary of the report, one page long.\n\nSummary:",
    ),
    "qmsum": DataSet(
        "rouge_l",
        512,
        "Here is the transcript of a meeting, and after it a query. Answer it in one or more sentences.\n\nTranscript:\n",
        "Answer the query from the transcript, in one or more sentences.\n\nQuery: {input}\nAnswer:",
    ),
    "multi_news": DataSet(
        "rouge_l",
        512,
        "Here are several news articles. Write a summary of all of them, one page long.\n\nNews:\n",
        "Now write a summary of all the news, one page long.\n\nSummary:",
    ),
    "trec": DataSet(
        "classification",
        64,
        "Find the type of the last question. Here are questions with their types.\n\n",
        "\n{input}",
        chat=False,
        first_line=True,
    ),
    "triviaqa": DataSet(
        "qa_f1",
        32,
        f"Answer the question from the passage. {_SHORT} Here are some examples.\n\n",
        "\n\n{input}",
        chat=False,
        first_line=True,
    ),
    "samsum": DataSet(
        "rouge_l",
        128,
        "Sum up the dialogue in a few short sentences. Here are some examples.\n\n",
        "\n\n{input}",
        chat=False,
        first_line=True,
    ),
    "passage_count": DataSet(
        "count",
        32,
        "Here are paragraphs, some of which are the same. Find out how many different ones there are.\n\n",
        "How many different paragraphs are there? Answer with the number only.\n\nThe number is:",
    ),
    "passage_retrieval_en": DataSet(
        "retrieval",
        32,
        "Here are numbered paragraphs and, after them, an abstract. Find the paragraph that the abstract is of.\n\n",
        'The abstract:\n\n{input}\n\nAnswer with the paragraph\'s number, in the form "Paragraph 1".\n\nThe answer is:',
    ),
    "lcc": DataSet("edit_similarity", 64, "Complete the code.\n", "Next line of code:\n", chat=False),
    "repobench-p": DataSet("edit_similarity", 64, "Complete the code.\n", "{input}Next line of code:\n", chat=False),
}
"""The English and code data sets; the Chinese ones would need another tokenisation of words for their scores."""

_CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")


@dataclass(frozen=True)
class Record:
    """One line of a file."""

    context: str
    input: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]
    dataset: str

    @classmethod
    def read(cls, line: str) -> Record:
        """From JSON; ValueError says what is wrong with it."""
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"it is not JSON ({error.msg} at character {error.pos + 1})") from None
        if not isinstance(data, dict):
            raise ValueError("it is not a JSON object")
        for name in ("context", "input", "dataset"):
            if not isinstance(data.get(name), str):
                raise ValueError(f"{name!r} is missing or is not text")
        answers, classes = data.get("answers"), data.get("all_classes") or []
        if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
            raise ValueError("'answers' is not a list of one or more texts")
        if not isinstance(classes, list) or not all(isinstance(each, str) for each in classes):
            raise ValueError("'all_classes' is neither null nor a list of texts")
        if not data["context"].strip():
            raise ValueError("'context' is empty")
        name = data["dataset"].removesuffix("_e")
        if name in _CHINESE:
            raise ValueError(f"data set {name!r} is in Chinese, which kvviz does not score. Use an English one")
        if name not in DATA_SETS:
            raise ValueError(f"data set {name!r} is unknown. Known ones: {', '.join(DATA_SETS)}")
        if DATA_SETS[name].metric == "classification" and not classes:
            raise ValueError(f"'all_classes' is empty, but {name!r} is scored by it")
        return cls(data["context"], data["input"], tuple(answers), tuple(classes), name)


def read(source: str) -> tuple[Record, ...]:
    """The records of a JSONL file on disk, or of a data set's name from the hub.

    Raises:
        TaskError: there is no such file or data set, or a line is not a record; the message names it.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return _records(path, path.stat().st_mtime_ns)
    if source.removesuffix("_e") in DATA_SETS:
        return _from_hub(source)
    raise TaskError(
        f"{source!r} is neither a file nor a data set of LongBench. Give a JSONL file in LongBench's form, or one of: "
        f"{', '.join(DATA_SETS)}."
    )


@lru_cache(maxsize=8)
def _records(path: Path, _: int) -> tuple[Record, ...]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read ({error}). Give a JSONL file in UTF-8.") from None
    return _parse(text, str(path))


def _parse(text: str, name: str) -> tuple[Record, ...]:
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            records.append(Record.read(line))
        except ValueError as error:
            raise TaskError(f"{name}, line {number}: {error}.") from None
    if not records:
        raise TaskError(f"{name} holds no records.")
    return tuple(records)


@lru_cache(maxsize=8)
def _from_hub(name: str) -> tuple[Record, ...]:
    try:
        archive = huggingface_hub.hf_hub_download(HUB, _ARCHIVE, repo_type="dataset")
        with zipfile.ZipFile(archive) as files:
            text = files.read(f"data/{name}.jsonl").decode("utf-8")
    except (OSError, KeyError, zipfile.BadZipFile, huggingface_hub.errors.EntryNotFoundError) as error:
        raise TaskError(
            f"{name} cannot be fetched from the hub ({type(error).__name__}). Connect to the internet (and unset "
            f"HF_HUB_OFFLINE), or unpack {_ARCHIVE} of {HUB} on a machine that is connected and give the file's path: "
            f"longbench:{name}.jsonl."
        ) from None
    return _parse(text, f"{name} of {HUB}")


@dataclass(frozen=True, kw_only=True)
class LongBench(Task):
    """Records of LongBench; the seed is the record's number, from 0, and the length the most that is read of it.

    Attributes:
        source: a JSONL file, or a data set's name on the hub.
    """

    source: str = ""

    family: ClassVar[str] = "LongBench"
    kind: ClassVar[str] = "records"
    metric: ClassVar[str] = ""
    max_new_tokens: ClassVar[int] = 512

    @property
    def path(self) -> str:
        """See Task."""
        return "" if self.source.removesuffix("_e") in DATA_SETS else self.source

    def draft(self, draw: Draw, size: int) -> Draft:
        """Records are read, not written."""
        raise NotImplementedError

    def make(self, seed: int, n_tokens: int, tokenizer) -> Example:
        """Record number `seed`, without its middle if it has more than `n_tokens` tokens."""
        records = read(self.source)
        if not 0 <= seed < len(records):
            raise TaskError(f"{self.source} holds {len(records)} records, numbered from 0; there is no number {seed}.")
        record = records[seed]
        whole = _example(record, record.context, tokenizer)
        if whole.tokens(tokenizer) <= n_tokens:
            return whole
        ids = tokenizer(record.context, add_special_tokens=False)["input_ids"]

        def shortened(size: int) -> Example:
            first, last = ids[: (size + 1) // 2], ids[len(ids) - size // 2 :]
            return _example(record, tokenizer.decode(first) + tokenizer.decode(last), tokenizer)

        try:
            size = largest(lambda size: shortened(1 + size).tokens(tokenizer), n_tokens)
        except TooSmall as error:
            raise TaskError(
                f"Record {seed} of {self.source} needs at least {error.least:,} tokens; {n_tokens:,} were asked for."
            ) from None
        return shortened(1 + size)


def _example(record: Record, context: str, tokenizer) -> Example:
    way = DATA_SETS[record.dataset]
    chat = way.chat and bool(tokenizer.chat_template)
    return Example(
        context=way.lead + context,
        question="\n\n" * (way.chat and not chat) + way.question.replace("{input}", record.input),
        answers=record.answers,
        metric=way.metric,
        chat=chat,
        classes=record.classes,
        first_line=way.first_line,
        max_new_tokens=way.max_new_tokens,
    )


def longbench_files() -> tuple[Task, ...]:
    """The task that reads records."""
    return (
        LongBench(
            name="longbench",
            title="LongBench's own records",
            measures="What the data set measures, by LongBench's own metric.",
        ),
    )
