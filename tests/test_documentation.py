"""Links and names in the documentation, and programs in it that other tests do not run."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from pages import PAGES, page_text
from write_reference import anchors_of

import collectives
import popdist
import strategies

ROOT = Path(__file__).parents[1]


def text_of(page):
    return page.read_text(encoding="utf-8")


def prose_of(page):
    """Return the page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def links_of(page):
    """Return the targets of a page's links into this project: a path, and the heading after #."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose_of(page))
    return [target.partition("#")[::2] for target in targets if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_pages_lead_to_existing_pages_and_headings(page):
    broken = []
    for path, anchor in links_of(page):
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(f"{path}#{anchor}" if anchor else path)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_ranges_of_hosts_are_quoted_where_a_shell_reads_them(page):
    """Bare brackets are a pattern for the shell: it may replace them by the name of a file, or (zsh) refuse them."""
    assert re.findall(r"^(?!usage: ).*(?:--host|-H)[ =][\w,.-]*\[.*$", text_of(page), flags=re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_text_of_a_link_is_no_file_name(page):
    """Readers of the site see titles, not files."""
    assert re.findall(r"\[[\w/.]+\.md\](?=\()", prose_of(page)) == []


NOT_EDITABLE = re.compile(
    r"pip install (?![^`\n]*(?:-e|--editable) )(?:[^`\n;,]* )?[\"']?(?:\.(?![\w./])|popdist-everywhere(?!==))"
)


@pytest.mark.parametrize("kind", ["pages", "texts of programs", "scripts"])
def test_installations_of_a_checkout_are_editable(kind):
    """Another installation replaces an editable one silently, and later changes of the checkout have no effect."""
    files = [path for folder in PROGRAMS for path in (ROOT / folder).rglob("*")]
    texts = {
        "pages": [(page, text_of(page)) for page in PAGES],
        "texts of programs": [(path, text) for path in files if path.suffix == ".py" for text in constants_of(path)],
        "scripts": [(path, text_of(path)) for path in files if path.suffix in (".sh", ".sbatch")],
    }
    found = [(path.name, wrong[0]) for path, text in texts[kind] for wrong in NOT_EDITABLE.finditer(text)]
    assert found == []


PROGRAMS = ("benchmarks", "collectives", "launch_scripts", "popdist", "poprun", "strategies")


def constants_of(program):
    """Return the texts in a program, with adjacent ones joined."""
    tree = ast.parse(text_of(program))
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


OWNERS = {
    "collectives": collectives,
    "popdist": popdist,
    "strategies": strategies,
    "strategy": strategies.Strategy,
    "trainer": strategies.Trainer,
}
OF_OTHER_LIBRARIES = {  # the pages on migration name their replacements, and Kubeflow's group is trainer.kubeflow.org
    *("popdist.popart", "popdist.poptorch"),
    *("strategy.experimental_distribute_dataset", "strategy.experimental_local_results"),
    *("trainer.fit", "trainer.kubeflow", "trainer.is_global_zero", "trainer.test", "trainer.validate"),
}
OF_TORCH = re.compile(r"trainer\.\w+")  # tests/strategies/on_torch checks the pages on PyTorch


def exists(owner, name):
    module = f"{owner}.{name}"
    return hasattr(OWNERS[owner], name) or (owner == OWNERS[owner].__name__ and importlib.util.find_spec(module))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_ours_on_pages_exist(page):
    mentioned = set(re.findall(rf"\b({'|'.join(OWNERS)})\.(?!md\b|py\b)([A-Za-z_]\w*)", text_of(page)))
    missing = {f"{owner}.{name}" for owner, name in mentioned if not exists(owner, name)}
    if "torch" in page.name or page.name == "lightning.md":
        missing = {name for name in missing if not OF_TORCH.fullmatch(name)}
    assert missing <= OF_OTHER_LIBRARIES


def test_the_map_from_symptoms_leads_to_files_that_exist():
    places = re.findall(r"`((?:poprun|popdist|collectives|strategies|tests)/[\w/.]+)`", page_text("where_to_look.md"))
    assert len(places) > 30
    assert [place for place in places if not (ROOT / place).exists()] == []


def rows_of(page, columns):
    """Return the cells of the rows of a page's tables with a number of columns."""
    lines = re.findall(r"^\| (.*) \|$", page_text(page), flags=re.MULTILINE)
    return [cells for line in lines if len(cells := [cell.strip() for cell in line.split("|")]) == columns]


def span_of(library, ours):
    """Return the range of the figures of a library beside some of ours, as README writes it."""
    rows = [row for row in rows_of("benchmarks.md", 5) if row[0] == library and re.match(ours, row[1])]
    figures = [figure for row in rows for cell in row[2:] for figure in re.findall(r"[\d.]+", cell)]
    return f"{min(figures, key=float)}-{max(figures, key=float)}"


def test_figures_of_readme_are_those_of_the_pages_on_measurements():
    of_libraries = {row[0]: row[3] for row in rows_of("README.md", 4)}
    of_torch, of_jax = "`(strategies.torch|DistributedModel|trainingModel)", "`PopDistStrategy` with JAX"
    tuned = f"with tuned settings {span_of('Horovod, PyTorch, tuned', of_jax)}"
    assert of_libraries["PyTorch DDP"] == span_of("PyTorch DDP over gloo", of_torch)
    assert of_libraries["Horovod"] == f"{span_of('Horovod, PyTorch', of_jax)}; {tuned}"
    assert of_libraries["tf.distribute"] == span_of("TensorFlow 2.21, MultiWorkerMirroredStrategy, RING", "`IPU")
    of_steps = {row[0]: row[1].partition(",")[0] for row in rows_of("gpu_measurements.md", 5)}
    ours, plain = of_steps["`Trainer`, 1 replica on 1 instance"], of_steps["plain, one program"]
    assert f"takes {ours} ms; plain JAX takes {plain} ms" in page_text("README.md")
