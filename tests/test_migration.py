"""The programs on the pages on migration, before and after."""

import importlib.util
import inspect
import re
import socket
import sys

import pytest
from horovod_installed import needs_horovod
from jobs import poprun_jobs
from pages import DOCS, blocks_in, page_programs, page_text
from tiers import also

import strategies

FOLDER = "migrate"
LIBRARIES = {  # of the program before, on each page
    "accelerate.md": "accelerate",
    "ddp.md": "torch",
    "from_estimators.md": "tensorflow.python.ipu",
    "from_horovod.md": "horovod",
    "from_keras.md": "keras",
    "from_poptorch.md": "poptorch",
    "fsdp.md": "torch",
    "lightning.md": "pytorch_lightning",
    "popdist_original.md": "tensorflow.python.ipu",
    "tf_distribute.md": "tensorflow",
}
INSTALLED_HERE = ["ddp.md", "fsdp.md", pytest.param("from_horovod.md", marks=needs_horovod), "from_keras.md"]
ANY_ORDER = (("shuffle=True", "shuffle=False"), (".shuffle(512, seed=0)", ""))  # libraries draw different orders
LINE = re.compile(r"loss (\d\.\d{5}), [0-9a-f]{64}")


def programs_of(page):
    """Return the programs under headings that begin with Before, and with After."""
    parts = re.split(r"^## (.*)$", page_text(page), flags=re.MULTILINE)[1:]
    sections = list(zip(parts[::2], parts[1::2], strict=True))
    found = []
    for word in ("Before", "After"):
        texts = [text for heading, text in sections if heading.startswith(word)]
        found.append(blocks_in("".join(texts), "python"))
    return found


PROGRAMS_AFTER = [
    (page, number) if (page, number) == ("ddp.md", 0) else also(page, number)
    for page in LIBRARIES
    for number in range(len(programs_of(page)[1]))
]


def written(folder, program, in_order=False):
    """Write a program to a file; `in_order` leaves out the shuffle of its rows."""
    if in_order:
        without = program
        for words, others in ANY_ORDER:
            without = without.replace(words, others)
        assert without != program
        program = without
    path = folder / f"program_{len(list(folder.iterdir()))}.py"
    path.write_text(program, encoding="utf-8")
    return sys.executable, str(path)


def needs(name):
    """Skip a test if a library is not installed."""
    try:
        is_there = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        pytest.skip(f"{name} is not installed")


def line_on(instances, replicas, words, *options):
    """Return the line of instance 0 under poprun."""
    finished = poprun_jobs.run(f"--num-instances={instances}", f"--num-replicas={replicas}", *options, *words)
    assert finished.status == 0, finished.stderr
    [line] = [line for line in finished.lines_of(0) if line.startswith("loss ")]
    return line


def line_alone(words, variables=None):
    """Return the line of a program without a launcher."""
    finished = poprun_jobs.run_alone(*words, environ=variables)
    [line] = [line for line in finished.stdout.splitlines() if line.startswith("loss ")]
    return line


def torchrun_of_one():
    """Return the variables that torchrun sets for a single process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def loss_of(line):
    return float(line.removeprefix("loss ").partition(",")[0])


def test_every_page_on_migration_is_tested():
    assert {page.name for page in DOCS if page.parent.name == FOLDER} == {*LIBRARIES, "index.md"}


@pytest.mark.parametrize("page", LIBRARIES)
def test_every_page_has_a_program_before_and_one_after(page):
    before, after = programs_of(page)
    assert len(before) == 1
    assert len(after) >= 1
    assert len(page_text(page).split()) <= 1500


def test_arguments_in_the_tables_are_arguments_of_ours():
    pytest.importorskip("torch")
    from strategies.torch import TorchOptions, distribute_dataset

    rows = [row for page in LIBRARIES for row in re.findall(r"^\|.*\|(.*)\|$", page_text(page), flags=re.MULTILINE)]
    named = {name for row in rows for name in re.findall(r"\b(\w+)=", row)}
    functions = [
        *(strategies.LocalStrategy, strategies.PopDistStrategy, strategies.Trainer, strategies.Trainer.run),
        *(strategies.StepOptions, strategies.Checkpoints, TorchOptions),
        *(strategies.Strategy.distribute_dataset, strategies.Strategy.variable, strategies.Strategy.run),
        *(strategies.Strategy.gather, strategies.Strategy.reduce, distribute_dataset),
    ]
    ours = {name for function in functions for name in inspect.signature(function).parameters}
    of_keras = {"global_batch_size", "map_gradient", "gradient_accumulation_reduction_method"}
    of_torch = {"use_reentrant"}
    assert len(named) > 20
    assert named - of_keras - of_torch <= ours


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.parametrize(("page", "number"), PROGRAMS_AFTER)
def test_programs_after_have_the_same_bits_on_one_instance_and_on_two(page, number, tmp_path):
    _, after = programs_of(page)
    if "import torch" in after[-1]:
        needs("torch")
    one = line_on(1, 2, written(tmp_path, after[-1]))
    assert LINE.fullmatch(one)
    assert line_on(2, 2, written(tmp_path, after[number])) == one


@pytest.mark.complete
@pytest.mark.job
def test_programs_after_for_pytorch_print_the_same_line_on_all_pages(tmp_path):
    pages = ("ddp.md", "fsdp.md", "lightning.md", "accelerate.md", "from_poptorch.md")
    lines = {line_alone(written(tmp_path, programs_of(page)[1][-1])) for page in pages}
    assert len(lines) == 1


@pytest.mark.complete
@pytest.mark.job
@pytest.mark.parametrize("page", LIBRARIES)
def test_programs_before_and_after_have_the_same_loss_for_one_replica(page, tmp_path):
    needs(LIBRARIES[page])
    before, after = programs_of(page)
    words = written(tmp_path, before[0], in_order=True)
    is_launched = page == "from_horovod.md"  # without a launcher, Open MPI leaves shared memory behind
    then = line_on(1, 1, words) if is_launched else line_alone(words, torchrun_of_one())
    for program in after:
        assert loss_of(line_alone(written(tmp_path, program, in_order=True))) == pytest.approx(loss_of(then), abs=2e-5)


@pytest.mark.complete
@pytest.mark.job
@pytest.mark.cores(2)
def test_a_program_that_keeps_lightnings_trainer_has_the_same_bits_on_one_instance_and_on_two(tmp_path):
    """In order and with one replica, its loss is that of the program before."""
    needs("pytorch_lightning")
    [program] = [text for text in page_programs("lightning.md") if '"popdist"' in text]
    kept = written(tmp_path, program)
    one = line_on(1, 2, kept)
    assert LINE.fullmatch(one)
    assert line_on(2, 2, kept) == one
    [before], _ = programs_of("lightning.md")
    then = loss_of(line_alone(written(tmp_path, before, in_order=True)))
    now = loss_of(line_alone(written(tmp_path, program, in_order=True)))
    assert now == pytest.approx(then, abs=2e-5)


@pytest.mark.complete
@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.parametrize("page", INSTALLED_HERE)
def test_programs_before_and_after_have_the_same_loss_for_two_replicas(page, tmp_path):
    """Keras has one process before, and its batch is shared by the replicas after."""
    before, after = programs_of(page)
    words = written(tmp_path, before[0], in_order=True)
    then = line_alone(words) if page == "from_keras.md" else line_on(2, 2, words)
    now = line_on(2, 2, written(tmp_path, after[-1], in_order=True))
    assert loss_of(now) == pytest.approx(loss_of(then), abs=2e-5)


@pytest.mark.complete
@pytest.mark.job
def test_the_loop_for_programs_of_the_original_prints_the_values_in_its_comment(tmp_path):
    [program] = [text for text in page_programs("popdist_original.md") if "IPUInfeedQueue" in text]
    assert poprun_jobs.run_alone(*written(tmp_path, program)).stdout == "[1.0, 5.0, 9.0]\n"
