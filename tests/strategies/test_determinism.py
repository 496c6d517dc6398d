"""Deterministic operations on GPUs: the flag, settings that are kept, and the way out."""

import logging
import os
from pathlib import Path

import jax
import pytest

from popdist.xla import DETERMINISTIC, deterministic_setting, shared_memory_setting
from strategies.jax.programs import xla_pitfalls
from strategies.jax.programs.compilation import usual_folder
from strategies.jax.programs.xla_pitfalls import WAY_OUT, use_deterministic_operations, way_out_of_refusals

FLAG = f"{DETERMINISTIC}=true"


@pytest.mark.parametrize(
    ("flags", "then"),
    [
        (None, FLAG),
        ("", FLAG),
        ("--xla_foo=1", f"--xla_foo=1 {FLAG}"),
        ("--xla_gpu_deterministic_ops_of_another_kind=1", f"--xla_gpu_deterministic_ops_of_another_kind=1 {FLAG}"),
        (f"--xla_foo=1 {DETERMINISTIC}=false", None),
        (DETERMINISTIC, None),
        ("/no/such/file", None),
    ],
)
def test_the_flag_is_added_unless_the_user_names_it(flags, then):
    environ = {} if flags is None else {"XLA_FLAGS": flags}
    assert deterministic_setting(environ) == ({} if then is None else {"XLA_FLAGS": then})


def test_a_file_of_flags_is_read(tmp_path):
    (tmp_path / "flags").write_text("--xla_foo=1\n--xla_bar=2\n")
    setting = deterministic_setting({"XLA_FLAGS": str(tmp_path / "flags")})
    assert setting == {"XLA_FLAGS": f"--xla_foo=1 --xla_bar=2 {FLAG}"}


def test_the_flag_is_set_before_jax_starts_and_known_to_xla(in_new_process):
    program = (
        "import os, jax\n"
        "from strategies.jax.programs.xla_pitfalls import use_deterministic_operations\n"
        "use_deterministic_operations(os.environ)\n"
        "print(os.environ['XLA_FLAGS'], jax.jit(lambda x: x + 1)(1.0))"
    )
    assert in_new_process(program).split() == [FLAG, "2.0"]


ON_GPUS = """
import contextlib, os, strategies
from strategies.defaults import Defaults
for wanted in (False, True):
    with contextlib.suppress(Exception):
        strategies.IPUStrategy(1, defaults=Defaults(deterministic=wanted))
    print(os.environ.get("XLA_FLAGS"))
"""


def test_a_strategy_on_gpus_sets_the_flag_unless_the_program_declines(in_new_process):
    """Without a GPU JAX does not start, but the flag is set by then."""
    assert in_new_process(ON_GPUS, JAX_PLATFORMS="cuda").split() == ["None", FLAG]


def test_jax_does_not_preallocate_memory_by_default():
    assert shared_memory_setting({}) == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert shared_memory_setting({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}) == {}
    assert shared_memory_setting({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}) == {}


@pytest.fixture
def caches_of_xla():
    before = jax.config.jax_persistent_cache_enable_xla_caches
    yield
    jax.config.update("jax_persistent_cache_enable_xla_caches", before)


@pytest.mark.usefixtures("caches_of_xla")
def test_a_jax_that_started_without_the_flag_is_one_warning(caplog):
    xla_pitfalls._warn.cache_clear()
    jax.device_put(1.0)
    environ = {"XLA_FLAGS": ""}
    for _ in range(2):
        use_deterministic_operations(environ)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert FLAG in record.getMessage()
    assert "Defaults(deterministic=False)" in record.getMessage()
    assert environ == {"XLA_FLAGS": ""}


@pytest.mark.usefixtures("caches_of_xla")
def test_a_user_who_names_the_flag_is_not_warned(caplog):
    xla_pitfalls._warn.cache_clear()
    use_deterministic_operations({"XLA_FLAGS": f"{DETERMINISTIC}=false"})
    assert not caplog.records


def refuse(text):
    with way_out_of_refusals():
        raise jax.errors.JaxRuntimeError(text)


def test_the_way_out_is_appended_to_the_error_of_xla():
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        refuse("HLO instruction %s does not have a deterministic implementation")
    assert caught.value.__notes__ == [WAY_OUT]
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        refuse("out of memory")
    assert not hasattr(caught.value, "__notes__")


def test_executables_of_gpus_have_a_folder_of_this_user_unless_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = Path(usual_folder({}))
    assert (folder.parent, folder.name) == (tmp_path.resolve(), f"popdist-executables-{os.geteuid()}")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert usual_folder({"POPDIST_EXECUTABLE_CACHE_PATH": ""}) == ""
    folder.chmod(0o777)
    assert usual_folder({}) == ""


KEEP = """\
import sys
from pathlib import Path
import jax
import jax.numpy as jnp
from jax._src import distributed
from strategies.jax.programs.compilation import compile_once_per_host
folder = Path(sys.argv[1])
distributed.global_state.process_id = 1
jax.config.update("jax_compilation_cache_dir", str(folder))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
compile_once_per_host(jax.jit(lambda x: jnp.sin(x)).lower(1.0), folder)
print(distributed.global_state.process_id, sum(path.name.endswith("-cache") for path in folder.iterdir()))
"""


def test_each_instance_caches_its_own_executables(tmp_path, in_new_process):
    assert in_new_process(KEEP, tmp_path).split() == ["1", "1"]
