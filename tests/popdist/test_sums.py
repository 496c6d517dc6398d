"""The choice of jaxlib versions that must be kept from wrong sums, from the version and the environment."""

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
    def test_a_correct_version_gets_no_flag(self, version):
        assert not adds_up_wrongly(version)
        assert right_sums_setting(version, {}) == {}
        assert complain_of_sums(version, {}) is None

    @pytest.mark.parametrize("version", WRONG)
    def test_a_version_measured_to_be_wrong_gets_the_flag(self, version):
        assert is_measured(version)
        assert right_sums_setting(version, {}) == {"XLA_FLAGS": WITHOUT_SUMS}

    @pytest.mark.parametrize("version", NEWER)
    def test_a_newer_version_is_assumed_to_be_wrong(self, version):
        assert adds_up_wrongly(version)
        assert not is_measured(version)

    def test_nothing_is_set_without_jaxlib(self):
        assert right_sums_setting("", {}) == {}
        assert complain_of_sums("", {}) is None


class TestFlags:
    @pytest.mark.parametrize(
        "flags", ["--xla_cpu_enable_fast_math=false", f"{FUSIONS}=-individual_dot", " --a=b  --c "]
    )
    def test_flags_of_the_user_are_kept(self, flags):
        assert setting(flags) == f"{flags.strip()} {WITHOUT_SUMS}"

    @pytest.mark.parametrize("flags", KEEPS_SUMS)
    def test_a_sufficient_flag_of_the_user_needs_no_addition(self, flags):
        assert setting(flags) is None
        assert complain_of_sums("0.10.2", {"XLA_FLAGS": flags}) is None

    @pytest.mark.parametrize("flags", ASKS)
    def test_a_user_who_enables_wrong_sums_is_warned(self, flags):
        assert setting(flags) is None
        assert complain_of_sums("0.10.2", {"XLA_FLAGS": flags}) == (
            "jaxlib 0.10.2 computes wrong sums on CPUs if it passes them to YNNPACK, and XLA_FLAGS asks for it "
            "(--xla_cpu_experimental_ynn_fusion_type); take reduce out of it "
            "(POPDIST_ALLOW_WRONG_SUMS=1 allows wrong sums)"
        )

    @pytest.mark.parametrize("flags", ["", "--xla_cpu_enable_fast_math=false", f"{FUSIONS}=-individual_dot"])
    def test_a_start_without_the_flag_is_refused(self, flags):
        assert complain_of_sums("0.11.0", {"XLA_FLAGS": flags}) == (
            "jaxlib 0.11.0 computes wrong sums on CPUs if it passes them to YNNPACK, and JAX has started without "
            "--xla_cpu_experimental_ynn_fusion_type=-reduce; make the strategy before JAX is used, or put that flag "
            "into XLA_FLAGS (POPDIST_ALLOW_WRONG_SUMS=1 allows wrong sums)"
        )

    def test_a_setting_is_not_repeated(self):
        environ = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
        environ |= right_sums_setting("0.10.2", environ)
        assert right_sums_setting("0.10.2", environ) == {}
        assert complain_of_sums("0.10.2", environ) is None

    def test_a_file_of_flags_is_read_into_the_variable(self, tmp_path):
        file = tmp_path / "flags"
        file.write_text("  --xla_cpu_enable_fast_math=false\n--xla_cpu_use_xnnpack=true\n")
        assert setting(str(file)) == f"--xla_cpu_enable_fast_math=false --xla_cpu_use_xnnpack=true {WITHOUT_SUMS}"
        file.write_text(f"{WITHOUT_SUMS}\n")
        assert setting(str(file)) is None

    def test_an_unreadable_file_is_left_to_xla(self, tmp_path):
        assert setting(str(tmp_path / "none")) is None


class TestPlatforms:
    @pytest.mark.parametrize("platforms", ["", "cpu", "cuda,cpu"])
    def test_programs_that_may_use_the_cpu_get_the_flag(self, platforms):
        assert setting("", JAX_PLATFORMS=platforms) == WITHOUT_SUMS

    @pytest.mark.parametrize("platforms", ["cuda", "tpu"])
    def test_programs_without_the_cpu_get_no_flag(self, platforms):
        assert setting("", JAX_PLATFORMS=platforms) is None

    def test_the_user_may_allow_wrong_sums(self):
        assert setting("", POPDIST_ALLOW_WRONG_SUMS="1") is None
        assert setting("", POPDIST_ALLOW_WRONG_SUMS="") == WITHOUT_SUMS
