"""Runs four small jobs with poprun --timeline, and draws what their reports show: docs/pictures/timeline_*.svg.

python docs/draw_timelines.py [NAME ...]     healthy, late, input or pipeline; all of them take a minute
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from popdist.timeline.asked import folder_beside  # noqa: E402
from poprun.trace.merging import RecordedJob, put_together  # noqa: E402
from poprun.trace.recordings import read_recordings  # noqa: E402
from poprun.trace.report.page import draw_shares, style  # noqa: E402
from poprun.trace.report.text import report_text  # noqa: E402
from poprun.trace.report.verdict import judge  # noqa: E402

PICTURES = Path(__file__).with_name("pictures")

PROGRAM = """\
import sys, time
import jax, jax.numpy as jnp, numpy as np, optax
import popdist, strategies

popdist.init()
strategy = strategies.PopDistStrategy()
slow_input = "input" in sys.argv

def read(index):
    if slow_input:
        time.sleep(0.002)
    return {"x": np.sin(np.arange(512, dtype=np.float32) + index)}

def loss_fn(variables, batch, key):
    hidden = batch["x"]
    for number, kernel in enumerate(variables):
        with strategies.pipeline_stage(number // 2):
            hidden = jnp.tanh(hidden @ kernel)
    return jnp.mean(hidden**2), {}

class Rows:
    def __len__(self): return 2560
    def __getitem__(self, index): return read(index)

pipelining = strategies.Pipelining([0, 1], "grouped") if "pipeline" in sys.argv else None
dataset = strategy.distribute_dataset(Rows(), batch_size=32, seed=0)
options = {"gradient_accumulation_count": 4} if pipelining else {}
trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.01), pipeline=pipelining, **options)
random = np.random.default_rng(0)
state = trainer.init([0.05 * random.standard_normal((512, 512)).astype(np.float32) for _ in range(4)])
for batch in dataset.epoch(0):
    state, _ = trainer.step(state, batch)
"""
LATE = [f"--inject=delay:instance=1,step={step},seconds=0.02" for step in range(2, 40)]
JOBS = {"healthy": [], "late": LATE, "input": [], "pipeline": []}


def main() -> None:
    """Run the jobs that are named, or all of them."""
    for name in sys.argv[1:] or JOBS:
        with tempfile.TemporaryDirectory() as folder:
            job = record(name, Path(folder))
        verdict = judge(job)
        print(f"{name}\n\n{report_text(job, verdict, 120)}\n")
        drawn = draw_shares(verdict.titles, verdict.shares)
        picture = drawn.replace(">", f"><style>{style()}</style>", 1)
        PICTURES.joinpath(f"timeline_{name}.svg").write_text(picture + "\n", encoding="utf-8")


def record(name: str, folder: Path) -> RecordedJob:
    """What the instances of a job have recorded."""
    program, trace = folder / "program.py", folder / "trace.json"
    program.write_text(PROGRAM, encoding="utf-8")
    shape = ["--num-instances=2", "--num-replicas=2", f"--ipus-per-replica={2 if name == 'pipeline' else 1}"]
    root = ["--allow-run-as-root=yes"] if os.geteuid() == 0 else []
    words = [sys.executable, "-m", "poprun", *shape, *root, f"--timeline={trace}", *JOBS[name], sys.executable]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*words, str(program), name], check=True, env=environ)
    return put_together(read_recordings(folder_beside(str(trace))))


if __name__ == "__main__":
    main()
