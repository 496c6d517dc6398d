"""Drawing of docs/pictures/timeline_*.svg: some steps of four small jobs under poprun --timeline.

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
from poprun.trace.report.page import style  # noqa: E402
from poprun.trace.report.step_table import StepTable, categories_of, last_attempt  # noqa: E402
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
TITLES = {
    "healthy": "Nothing is wrong: both instances compute, exchange gradients and update at the same time",
    "late": "Instance 1 sleeps for 20 ms in each step (rest): instance 0 waits for it",
    "input": "Reading takes most of the time (input): the instance that has read ahead waits for the other one",
    "pipeline": "Each replica is a pipeline of two stages: most of the time is compute",
}
STEPS = {"healthy": 4, "late": 3, "input": 3, "pipeline": 3}
"""The number of steps in each picture."""
FIRST = 10
"""The earliest step of a picture: by then data read ahead are used up, and everything is compiled."""
WIDTH, LEFT, TOP, ROW, BAR = 900, 90, 70, 36, 24


def main() -> None:
    """Run the named jobs, or all of them, and draw each."""
    for name in sys.argv[1:] or JOBS:
        with tempfile.TemporaryDirectory() as folder:
            job = record(name, Path(folder))
        verdict = judge(job)
        print(f"{name}\n\n{report_text(job, verdict, 120)}\n")
        picture = draw(job, verdict.table, TITLES[name], STEPS[name])
        PICTURES.joinpath(f"timeline_{name}.svg").write_text(picture, encoding="utf-8")


def draw(job: RecordedJob, table: StepTable, title: str, count: int) -> str:
    """Return the steps of the least disturbed part of a job, on one axis of time, as SVG."""
    first, last = quietest(table, count)
    begin = int(table.begin_ns[:, first].min())
    scale = (WIDTH - LEFT) / (int(table.end_ns[:, last].max()) - begin)
    rows = [
        sorted(_parts(job, place, int(table.steps[first]), int(table.steps[last])), key=lambda part: part[0] != "rest")
        for place in last_attempt(job)
    ]
    shown = list(dict.fromkeys(name for row in rows for name, _, _ in row))
    parts = [f'<text x="0" y="14" font-weight="bold">{title}</text>', *_keys(shown)]
    for number, row in enumerate(rows):
        top = TOP + number * ROW
        parts.append(f'<text x="0" y="{top + 17}">instance {number}</text>')
        left = LEFT + (int(table.begin_ns[number, first]) - begin) * scale
        right = LEFT + (int(table.end_ns[number, last]) - begin) * scale
        parts.append(_bar("rest", left, top, right - left))
        parts += [_bar(name, LEFT + (at - begin) * scale, top, lasted * scale) for name, at, lasted in row]
        parts += _ticks(table, number, first, last, begin, scale)
    bottom = TOP + len(rows) * ROW
    lasted_ms = (WIDTH - LEFT) / scale / 1e6
    parts.append(f'<text x="{LEFT}" y="{bottom + 14}">0</text>')
    parts.append(f'<text x="{WIDTH}" y="{bottom + 14}" text-anchor="end">{lasted_ms:.1f} ms</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 20}" role="img">'
    return f"{head}<style>{style()}</style><title>{title}</title>{''.join(parts)}</svg>\n"


def quietest(table: StepTable, count: int) -> tuple[int, int]:
    """Return the first and last of `count` consecutive settled steps that took the least time."""
    lasted = table.lasted_ns.max(axis=0)
    settled = table.is_settled
    starts = [n for n in range(FIRST, len(table.steps) - count) if settled[n : n + count].all()]
    first = min(starts, key=lambda n: lasted[n : n + count].sum())
    return first, first + count - 1


def _parts(job: RecordedJob, place: int, first: int, last: int) -> list[tuple[str, int, int]]:
    found = []
    for category, spans in categories_of(job.spans[place], job.aligned[place].recording).items():
        chosen = spans[(spans["step"] >= first) & (spans["step"] <= last)]
        found += [(category, int(each["begin_ns"]), int(each["end_ns"] - each["begin_ns"])) for each in chosen]
    return sorted(found, key=lambda part: part[0] in ("waiting", "exchange"))


def _ticks(table: StepTable, row: int, first: int, last: int, begin: int, scale: float) -> list[str]:
    """Draw the beginnings of an instance's steps; the first instance has their numbers."""
    parts = []
    for column in range(first, last + 1):
        left = LEFT + (int(table.begin_ns[row, column]) - begin) * scale
        top = TOP + row * ROW
        parts.append(f'<path class="axis" d="M{left:.1f} {top - 6}V{top + BAR + 2}"/>')
        if row == 0:
            parts.append(f'<text x="{left + 4:.1f}" y="{top - 8}">step {table.steps[column]}</text>')
    return parts


def _keys(names: list[str]) -> list[str]:
    parts, left = [], LEFT
    for name in [*(each for each in names if each != "rest"), "rest"]:
        parts.append(f'<rect class="{name}" x="{left}" y="26" width="12" height="12"/>')
        parts.append(f'<text x="{left + 16}" y="37">{name}</text>')
        left += 34 + 8 * len(name)
    return parts


def _bar(category: str, left: float, top: int, width: float) -> str:
    return f'<rect class="{category}" x="{left:.1f}" y="{top}" width="{max(width, 0.2):.1f}" height="{BAR}"/>'


def record(name: str, folder: Path) -> RecordedJob:
    """Run a job, and return the recordings of its instances."""
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
