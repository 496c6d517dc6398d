"""Compiling once: turns between instances, folders of executables, and reasons for compiling again."""

import logging

import jax
import numpy as np
import pytest

from strategies.compilation import compiled_in_turn, explain_recompilation, turn, use_executable_cache


def test_without_a_folder_nothing_is_kept():
    assert use_executable_cache({}) is None
    program = jax.jit(lambda x: x)
    assert compiled_in_turn(program, None) is program


def test_a_folder_that_cannot_be_made_is_one_clear_error():
    with pytest.raises(ValueError, match="is /dev/null/x, where no folder can be made: Not a dir.*name another"):
        use_executable_cache({"POPDIST_EXECUTABLE_CACHE_PATH": "/dev/null/x"})


def test_in_a_folder_that_cannot_be_written_everybody_compiles(tmp_path):
    with turn(tmp_path / "none") as is_first:
        assert not is_first


def test_only_one_compiles_at_a_time_and_the_others_do_not_wait_for_ever(tmp_path, caplog):
    with turn(tmp_path) as is_first, caplog.at_level(logging.WARNING):
        assert is_first
        with turn(tmp_path, wait_s=0) as is_second:
            assert not is_second
        program = compiled_in_turn(jax.jit(lambda x: x + 1), tmp_path, wait_s=0)
        assert program(np.float32(1)) == 2
    assert "waited 0 s for another instance that compiles" in caplog.text
    with turn(tmp_path, wait_s=0) as is_next:
        assert is_next


def test_a_program_that_is_only_traced_is_not_compiled(tmp_path):
    program = compiled_in_turn(jax.jit(lambda x: x + 1), tmp_path)
    with turn(tmp_path):
        assert jax.eval_shape(program, np.float32(1)).shape == ()


def test_a_recompilation_is_explained_by_the_shapes_before_and_now():
    first, last = {"x": np.zeros((8, 3), np.float32)}, {"x": np.zeros((5, 3), np.float32), "y": np.zeros(2, np.int32)}
    assert explain_recompilation([], first) is None
    reason = explain_recompilation([first], last)
    assert "for the 2nd time: ['x'] was float32[8, 3] and is float32[5, 3]; ['y'] was absent and is int32[2]" in reason
    assert "the batch was float32[2] and is float32[1]" in explain_recompilation(
        [np.zeros(2, np.float32)], np.zeros(1, np.float32)
    )
