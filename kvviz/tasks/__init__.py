"""Tasks: examples of any length, written from a seed, each with an exact metric.

Thirteen kinds of RULER's and six of LongBench's, on texts that were written for kvviz; plain text to read on, which needs no
labels; and LongBench's own records, from a file or the hub.

    example = kvviz.tasks.parse("niah_single_2:depth=0.5").make(seed=0, n_tokens=1024, tokenizer=engine.tokenizer)
    example.score("60494")
"""

from kvviz.tasks.registry import TASKS, names, parse, task
from kvviz.tasks.task import Example, Task, TaskError

__all__ = ["TASKS", "Example", "Task", "TaskError", "names", "parse", "task"]
