"""Which jaxlib must be kept from wrong sums, and how: decided from its version and the variables of the process."""

from __future__ import annotations

import pytest

from popdist.xla import FUSIONS, WITHOUT_SUMS, adds_up_wrongly, complain_of_sums, is_measured, right_sums_setting

RIGHT = ("0.9.0", "0.9.0.1", "0.9.2", "0.10.0", "0.10.1")
WRONG = ("0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1")
NEWER = ("0.12.0.2", "0.12.1", "0.13.0.dev20261130", "1.0")
KEEPS_SUMS = (
    WITHOUT_SUMS,
    f"{FUSIONS}=",
    f"{FUSIONS}=individual_dot",
    f"{FUSIONS}=-individual_dot,-reduce",
    f"{FUSIONS}='-REDUCE'",
    f"{FUSIONS}=-library_fusion_type_reduce",
    f"{FUSIONS}=+reduce --xla_cpu_enable_fast_math=false {FUSIONS}=-reduce",
)
ASKS = (
    f"{FUSIONS}=reduce",
    f"{FUSIONS}=+reduce",
    f"{FUSIONS}=individual_dot,LIBRARY_FUSION_TYPE_REDUCE",
    f"{WITHOUT_SUMS} {FUSIONS}=+reduce",
)


def setting(flags: str, jaxlib: str = "0.10.2", **variables: str) -> str | None:
    return right_sums_setting(jaxlib, variables | {"XLA_FLAGS": flags}).get("XLA_FLAGS")


class TestVersions:
    @pytest.mark.parametrize("version", RIGHT)
    def test_those_that_add_up_right_are_left_alone(self, version):
        assert not adds_up_wrongly(version)
        assert right_sums_setting(version, {}) == {}
        assert complain_of_sums(version, {}) is None

    @pytest.mark.parametrize("version", WRONG)
    def test_those_that_were_seen_to_be_wrong_get_the_flag(self, version):
        assert is_measured(version)
        assert right_sums_setting(version, {}) == {"XLA_FLAGS": WITHOUT_SUMS}

    @pytest.mark.parametrize("version", NEWER)
    def test_newer_ones_are_held_to_be_wrong_too_but_were_not_looked_at(self, version):
        assert adds_up_wrongly(version)
        assert not is_measured(version)

    def test_without_jaxlib_there_is_nothing_to_do(self):
        assert right_sums_setting("", {}) == {}
        assert complain_of_sums("", {}) is None


class TestFlags:
    @pytest.mark.parametrize(
        "flags", ["--xla_cpu_enable_fast_math=false", f"{FUSIONS}=-individual_dot", " --a=b  --c "]
    )
    def test_those_of_the_user_stay(self, flags):
        assert setting(flags) == f"{flags.strip()} {WITHOUT_SUMS}"

    @pytest.mark.parametrize("flags", KEEPS_SUMS)
    def test_a_user_who_has_seen_to_it_needs_nothing(self, flags):
        assert setting(flags) is None
        assert complain_of_sums("0.10.2", {"XLA_FLAGS": flags}) is None

    @pytest.mark.parametrize("flags", ASKS)
    def test_a_user_who_asks_for_wrong_sums_is_told(self, flags):
        assert setting(flags) is None
        assert complain_of_sums("0.10.2", {"XLA_FLAGS": flags}) == (
            "jaxlib 0.10.2 computes wrong sums on CPUs if it passes them to YNNPACK, and XLA_FLAGS asks for it "
            "(--xla_cpu_experimental_ynn_fusion_type); take reduce out of it "
            "(POPDIST_ALLOW_WRONG_SUMS=1 allows wrong sums)"
        )

    @pytest.mark.parametrize("flags", ["", "--xla_cpu_enable_fast_math=false", f"{FUSIONS}=-individual_dot"])
    def test_a_start_without_the_flag_is_complained_of(self, flags):
        assert complain_of_sums("0.11.0", {"XLA_FLAGS": flags}) == (
            "jaxlib 0.11.0 computes wrong sums on CPUs if it passes them to YNNPACK, and JAX has started without "
            "--xla_cpu_experimental_ynn_fusion_type=-reduce; make the strategy before JAX is used, or put that flag "
            "into XLA_FLAGS (POPDIST_ALLOW_WRONG_SUMS=1 allows wrong sums)"
        )

    def test_what_is_set_once_is_enough(self):
        environ = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
        environ |= right_sums_setting("0.10.2", environ)
        assert right_sums_setting("0.10.2", environ) == {}
        assert complain_of_sums("0.10.2", environ) is None

    def test_a_file_of_flags_is_written_out(self, tmp_path):
        file = tmp_path / "flags"
        file.write_text("  --xla_cpu_enable_fast_math=false\n--xla_cpu_use_xnnpack=true\n")
        assert setting(str(file)) == f"--xla_cpu_enable_fast_math=false --xla_cpu_use_xnnpack=true {WITHOUT_SUMS}"
        file.write_text(f"{WITHOUT_SUMS}\n")
        assert setting(str(file)) is None

    def test_a_file_that_cannot_be_read_is_left_to_xla_which_says_so(self, tmp_path):
        assert setting(str(tmp_path / "none")) is None


class TestWhereItMatters:
    @pytest.mark.parametrize("platforms", ["", "cpu", "cuda,cpu"])
    def test_programs_that_may_compute_on_the_cpu_get_the_flag(self, platforms):
        assert setting("", JAX_PLATFORMS=platforms) == WITHOUT_SUMS

    @pytest.mark.parametrize("platforms", ["cuda", "tpu"])
    def test_others_do_not(self, platforms):
        assert setting("", JAX_PLATFORMS=platforms) is None

    def test_the_user_may_want_jaxlib_as_it_is(self):
        assert setting("", POPDIST_ALLOW_WRONG_SUMS="1") is None
        assert setting("", POPDIST_ALLOW_WRONG_SUMS="") == WITHOUT_SUMS
