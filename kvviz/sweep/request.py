"""What a sweep asks for: a frozen request of plain values, spread out into prompts (cases) and their rows (cells)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from kvviz import budget as budgets
from kvviz.engine import Engine
from kvviz.events import Event
from kvviz.host import ModelSpec
from kvviz.models import DEFAULT
from kvviz.policies.policy import Policy, policy
from kvviz.policies.spec import spec
from kvviz.prefill import Progress
from kvviz.tasks import Task

FULL = policy("full")


@dataclass(frozen=True)
class Budget:
    """As it was asked for: `entries` a head, or the share of the prompt's entries that is `removed`."""

    entries: int | None = None
    removed: float | None = None

    def __post_init__(self) -> None:
        if (self.entries is None) == (self.removed is None):
            raise ValueError("A budget is either a number of entries or a share removed.")
        self.of(1)

    def of(self, n_tokens: int) -> int:
        """In entries a head, for a prompt of n_tokens."""
        if self.removed is not None:
            return budgets.from_share(n_tokens, self.removed)
        return budgets.check_entries(self.entries)

    def __str__(self) -> str:
        return str(self.entries) if self.removed is None else f"{100 * self.removed:g}% removed"


@dataclass(frozen=True)
class Case:
    """One prompt: an example of a task, with the question seen by eviction or asked afterwards."""

    task: Task
    length: int
    seed: int
    seen: bool


@dataclass(frozen=True)
class Cell:
    """One row: a policy at a budget (None: the full cache, which has none) on a prompt."""

    case: Case
    policy: Policy
    budget: Budget | None = None

    @property
    def key(self) -> tuple:
        """What tells it from all others in a folder."""
        case, asked = self.case, "all" if self.budget is None else str(self.budget)
        return case.task.spec, case.length, case.seed, case.seen, spec(self.policy), asked


@dataclass(frozen=True)
class Sweep:
    """Tasks x lengths x seeds x scenarios x (policies x taus x budgets), and the full cache once a prompt.

    Attributes:
        lengths: tokens of a prompt, with its question.
        budgets, shares_removed: entries a head, and shares of the prompt's entries that are evicted; both may be given.
        taus: for every policy that has a tau, instead of its own; empty: its own.
        scenarios: whether eviction sees the question: (False,), (True,) or both. Plain text has no question and runs once.
        max_new_tokens: of every row; None: what the task takes.
        compare: measure the divergence from the full cache along its output too (it takes another reading).
        evict_every: also evict while writing, every so many tokens.
        folder: where rows are saved as they come; None: in memory only.
        resume: go on with what the folder holds already.
    """

    model: ModelSpec
    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    policies: tuple[Policy, ...] = ()
    budgets: tuple[int, ...] = ()
    shares_removed: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0,)
    taus: tuple[float, ...] = ()
    scenarios: tuple[bool, ...] = (False,)
    max_new_tokens: int | None = None
    compare: bool = False
    evict_every: int | None = None
    folder: str | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("tasks", "lengths", "seeds", "scenarios"):
            if not getattr(self, name):
                raise ValueError(f"A sweep needs {name}.")
        if self.variants and not self.sizes:
            raise ValueError("A sweep of policies needs budgets, in entries or as shares removed.")
        if min(self.lengths) < 1 or (self.max_new_tokens or 1) < 1:
            raise ValueError("Lengths and new tokens are numbers of at least 1.")
        if self.resume and self.folder is None:
            raise ValueError("To resume, name the folder of the earlier sweep.")
        if self.evict_every is not None:
            [each.scorer.while_decoding(self.evict_every) for each in self.variants]

    @property
    def sizes(self) -> tuple[Budget, ...]:
        """All budgets, each once."""
        made = [Budget(entries=n) for n in self.budgets] + [Budget(removed=share) for share in self.shares_removed]
        return tuple(dict.fromkeys(made))

    @property
    def variants(self) -> tuple[Policy, ...]:
        """Every policy with every tau, each once, but for the full cache."""
        made = []
        for each in self.policies:
            has_tau = "tau" in each.settings() and self.taus
            made += [replace(each, scorer=replace(each.scorer, tau=t)) for t in self.taus] if has_tau else [each]
        return tuple(dict.fromkeys(p for p in made if p != FULL))

    @property
    def cases(self) -> list[Case]:
        """Every prompt; seed after seed, so that a sweep that is cut short has some of everything."""
        made = []
        for seed, length, task in product(*(dict.fromkeys(x) for x in (self.seeds, self.lengths, self.tasks))):
            scenarios = self.scenarios[:1] if task.family == "text" else dict.fromkeys(self.scenarios)
            made += [Case(task, length, seed, seen) for seen in scenarios]
        return made

    def cells(self, case: Case) -> list[Cell]:
        """The rows of a prompt, the full cache first."""
        return [Cell(case, FULL), *(Cell(case, p, size) for p, size in product(self.variants, self.sizes))]

    @property
    def n_rows(self) -> int:
        """How many rows it will have."""
        return len(self.cases) * (1 + len(self.variants) * len(self.sizes))

    def run(self, engine: Engine, progress: Progress) -> Iterator[Event]:
        """Yield Sweeping, Scored and at last Finished, whose `run` is a `Result`. What is saved stays when it is cancelled.

        Raises:
            KvvizError, ValueError: a task, a length or a folder cannot be used; nothing was run then.
        """
        from kvviz.sweep.run import run

        return run(self, engine, progress)

    def command(self) -> str:
        """The command line that repeats it."""
        return shlex.join(["python", "-m", "kvviz", "sweep", *arguments(self)])


def arguments(sweep: Sweep) -> list[str]:
    """What `python -m kvviz sweep` takes to make the same sweep."""
    model = sweep.model
    words = [] if model.name == DEFAULT else ["--model", model.name]
    words += [f"--{name}={getattr(model, name)}" for name in ("device", "dtype") if getattr(model, name)]
    for task in sweep.tasks:
        words += ["--task", task.spec]
    for each in sweep.policies:
        words += ["--policy", spec(each)]
    numbers = {"length": sweep.lengths, "seed": sweep.seeds, "budget": sweep.budgets}
    numbers |= {"share-removed": sweep.shares_removed, "tau": sweep.taus}
    for flag, values in numbers.items():
        words += [f"--{flag}={','.join(f'{value:.12g}' for value in values)}"] if values else []
    words += ["--scenario", "both" if len(set(sweep.scenarios)) > 1 else "seen" if sweep.scenarios[0] else "after"]
    optional = {"max-new-tokens": sweep.max_new_tokens, "evict-every": sweep.evict_every}
    words += [f"--{flag}={value}" for flag, value in optional.items() if value is not None]
    words += ["--compare"] if sweep.compare else []
    words += ["--out", sweep.folder] if sweep.folder else []
    return words
