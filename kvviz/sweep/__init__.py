"""Sweeps: any set of tasks x lengths x seeds x policies x budgets x taus as one job, saved as it comes and resumable.

sweep = Sweep(ModelSpec("smollm2-135m-instruct"), (kvviz.tasks.task("niah_single_2"),), (1024,),
              (kvviz.policy("capkv"), kvviz.policy("momentkv")), budgets=(128, 256), folder="out")
for event in sweep.run(engine, progress): ...     # or host.submit(sweep)
load("out").frame()
"""

from kvviz.sweep.request import Budget, Case, Cell, Sweep
from kvviz.sweep.rows import SweepRow
from kvviz.sweep.run import Scored, Sweeping
from kvviz.sweep.store import Result, SweepError, load

__all__ = ["Budget", "Case", "Cell", "Result", "Scored", "Sweep", "SweepError", "SweepRow", "Sweeping", "load"]
