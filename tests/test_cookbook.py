"""The recipes run, and train the same bits on several instances.

tests/test_page_programs.py runs the blocks of all pages in one process. Here a page is one program under poprun.
"""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
from jobs import poprun_jobs
from pages import page_programs

LIMIT_S = 300.0
PAGES = {
    "cookbook_jax.md": [],
    "cookbook_torch.md": ["torch"],
    "flax_equinox.md": ["flax", "equinox"],
    "tuning.md": [],
}
"""The pages, and the libraries that each needs besides those of a plain installation."""

ALONE = "strategies.LocalStrategy(num_replicas=4)"
IN_A_JOB = "strategies.PopDistStrategy()"

REPORT = """
for _name, _value in sorted(globals().items()):
    if isinstance(_value, strategies.TrainState):
        _bits = strategies.fingerprint((_value.variables, _value.model_state))
    elif type(_value).__module__.startswith("__main__") and hasattr(_value, "state_dict"):
        _bits = strategies.fingerprint(_value.state_dict())
    elif type(_value).__name__ in ("Sequential", "AveragedModel"):
        _bits = strategies.fingerprint(_value.state_dict())
    elif isinstance(_value, strategies.Evaluation):
        _bits = _value["loss"].hex()
    else:
        continue
    strategy.on_chief(lambda: print("recipe", {number}, _name, _bits, flush=True))
"""
"""Behind each block: print the bits of all trainings and evaluations so far."""

pytestmark = [pytest.mark.job, pytest.mark.timeout(2 * LIMIT_S + 20)]


def require_libraries(page):
    for library in PAGES[page]:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")


def lines_of_job(page, instances, folder):
    """Run a page as one program on some instances; return the bits that it reports."""
    blocks = [block + REPORT.replace("{number}", str(number)) for number, block in enumerate(page_programs(page))]
    assert ALONE in blocks[0]
    program = folder / f"on_{instances}.py"
    begin = f"import tempfile\ntempfile.tempdir = {str(folder)!r}\n"  # for the folders that recipes make
    program.write_text(begin + "\n".join(blocks).replace(ALONE, IN_A_JOB), encoding="utf-8")
    words = (f"--num-instances={instances}", "--num-replicas=4", sys.executable, str(program))
    done = poprun_jobs.start(*words, cwd=folder).finish(LIMIT_S)
    assert done.status == 0, done.stderr
    return [line for line in done.lines_of(0) if line.startswith("recipe ")]


@pytest.mark.complete
@pytest.mark.cores(2)
@pytest.mark.parametrize("page", PAGES)
def test_all_recipes_of_a_page_train_the_same_bits_on_one_and_on_two_instances(page, tmp_path):
    require_libraries(page)
    one, two = (lines_of_job(page, instances, tmp_path) for instances in (1, 2))
    recipes = {int(re.match(r"recipe (\d+) ", line)[1]) for line in one}
    assert recipes
    assert recipes | {0} == set(range(len(page_programs(page))))  # the first block may have the data only
    assert two == one
