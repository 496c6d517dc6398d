"""Trees of typed attributes, on a made-up configuration."""

from __future__ import annotations

import copy
import enum
import json

import pytest

from strategies.compat.config_tree import AttributeMetadata, Category, fits, text_of

Colour = enum.Enum("Colour", {"RED": 0, "BLUE": 7})


class Leaves:
    """Things that hang there.

    Attributes:
        colour: Of leaves.
        mixed: Either.
    """

    colour: Colour = Colour.RED
    mixed: Colour | bool = False


class Branches:
    """All branches.

    Attributes:
        length: In metres.
            Effect: they are longer.
        older: What length was.
    """

    DEPRECATED = {"older": "use length."}
    length: int = 1
    older: int = 2
    leaves: Leaves


class Tree(Category):
    """A tree."""

    height: int | str | list[int] = 1
    rings: tuple[list[float | tuple[str]], ...] = ([1.0],)
    names: dict[str, str] = {}
    branches: Branches
    roots: Branches

    _title = "Tree"

    def __init__(self):
        super().__init__(Tree)


@pytest.fixture
def tree():
    return Tree()


class TestAssignment:
    def test_values_are_kept_where_they_are_set(self, tree):
        tree.height, tree.branches.length = 5, 6
        assert (tree.height, tree.branches.length, tree.roots.length) == (5, 6, 1)

    @pytest.mark.parametrize("value", [True, (1,), 1.0, None, ["1"]], ids=repr)
    def test_a_value_of_another_type_is_refused_and_not_kept(self, tree, value):
        with pytest.raises(TypeError, match=r"^Trying to set height to .*, but it must be of type int \| str \| list"):
            tree.height = value
        assert tree.height == 1

    @pytest.mark.parametrize("value", [1, "one", [], [1, 2]], ids=repr)
    def test_any_type_of_a_union_is_taken(self, tree, value):
        tree.height = value
        assert tree.height == value

    def test_the_full_name_is_in_the_message(self, tree):
        with pytest.raises(TypeError, match=r"^Trying to set branches\.length to True, but it must be of type int$"):
            tree.branches.length = True

    def test_a_category_cannot_be_assigned_to_nor_anything_deleted(self, tree):
        with pytest.raises(TypeError, match="branches is a category and cannot be assigned to; set .*: length, older"):
            tree.branches = 3
        with pytest.raises(TypeError, match="height cannot be deleted"):
            del tree.height

    def test_defaults_belong_to_one_tree(self, tree):
        tree.names["de"] = "Baum"
        assert Tree().names == {}


NESTED = tuple[list[float | tuple[str]], ...]


class TestTypes:
    @pytest.mark.parametrize(
        ("hint", "fitting", "others"),
        [
            (NESTED, [([1.0],), ([1.0, ("a",)], []), ()], [[[1.0]], ([True],), ([("a", "b")],), ([1],), 1.0]),
            (tuple[int, str], [(1, "a")], [(1,)]),
            (dict[str, int], [{"a": 1}], [{"a": True}]),
            (Colour, [Colour.RED], [0]),
        ],
    )
    def test_fit_exactly(self, hint, fitting, others):
        assert all(fits(value, hint) for value in fitting)
        assert not any(fits(value, hint) for value in others)

    def test_hints_are_written_as_in_programs(self):
        assert text_of(NESTED) == "tuple[list[float | tuple[str]], ...]"


class TestDidYouMean:
    @pytest.mark.parametrize(
        ("ask", "meant"),
        [
            (lambda tree: tree.heightt, "height"),
            (lambda tree: tree.branchess, "branches"),
            (lambda tree: tree.branches.lengt_h, "branches.length"),
            (lambda tree: tree.colour, "branches.leaves.colour"),
            (lambda tree: setattr(tree, "heightt", 3), "height"),
            (lambda tree: setattr(tree.branches, "lengt_h", 3), "branches.length"),
        ],
    )
    def test_a_similar_name_is_suggested(self, tree, ask, meant):
        with pytest.raises(ValueError, match=rf" is not a valid attribute of this config\. Did you mean '{meant}'\?$"):
            ask(tree)

    def test_all_attributes_are_listed_without_a_similar_name(self, tree):
        with pytest.raises(ValueError, match=r"'zzz' is not a valid attribute .* It has length, older, leaves\.$"):
            _ = tree.branches.zzz

    def test_private_names_are_no_attributes(self, tree):
        with pytest.raises(ValueError, match="'_own' is not a valid attribute"):
            tree._own = []

    def test_an_attribute_of_a_category_is_no_attribute_of_the_tree(self, tree):
        with pytest.raises(ValueError, match="'branches.length' is not a valid attribute"):
            setattr(tree, "branches.length", 3)
        assert not hasattr(tree, "branches.length")

    def test_hasattr_of_an_unknown_name_is_no_error(self, tree):
        assert hasattr(tree, "height")
        assert not hasattr(tree, "heightt")


class TestCategories:
    def test_a_category_is_one_object(self, tree):
        assert tree.branches is tree.branches
        assert tree.branches.leaves is tree.branches.leaves

    def test_a_copy_has_categories_of_its_own(self, tree):
        inner = tree.roots
        for copied in (copy.deepcopy(tree), copy.copy(tree)):
            copied.roots.length = 9
            assert (copied.roots.length, tree.roots.length, inner.length) == (9, 1, 1)
        copied = copy.deepcopy(tree.roots)
        copied.leaves.colour = Colour.BLUE
        assert (copied.leaves.colour, tree.roots.leaves.colour) == (Colour.BLUE, Colour.RED)


class TestMetadata:
    def test_metadata_describe_an_attribute(self, tree):
        found = tree.get_attribute_metadata("branches.length")
        assert (found.name, found.type, found.default, found.__doc__) == ("branches.length", "int", 1, "In metres.")
        assert (found.effect, found.deprecated) == ("they are longer", False)
        assert tree.branches.get_attribute_metadata("length") == found

    def test_metadata_of_a_category_have_no_type(self, tree):
        found = tree.get_attribute_metadata("branches")
        assert (found.type, found.default, found.__doc__) == (None, None, "All branches.")
        for value in (None, 1):
            with pytest.raises(TypeError, match="Trying to set branches"):
                found.check_type(value)

    def test_metadata_are_made_of_a_name_a_description_a_type_and_a_default(self, tree):
        made = AttributeMetadata("branches.length", "In metres.", "int", 1, effect="they are longer")
        assert made == tree.branches.get_attribute_metadata("length")
        assert repr(made) == (
            "AttributeMetadata(name='branches.length', description='In metres.', type='int', default=1, "
            "deprecated_msg=None, effect='they are longer')"
        )

    @pytest.mark.parametrize("name", ["branches.lengthhh", "height.x", "_metadata", ""])
    def test_metadata_of_an_unknown_name_are_refused(self, tree, name):
        with pytest.raises(ValueError, match=f"^Could not get attribute metadata for '{name}': "):
            tree.get_attribute_metadata(name)

    def test_a_name_is_relative_to_its_category(self, tree):
        with pytest.raises(ValueError, match="for 'branches.length': 'branches' is not a valid attribute"):
            tree.branches.get_attribute_metadata("branches.length")

    def test_the_names_of_the_innermost_category_are_listed(self, tree):
        with pytest.raises(ValueError, match=r"for 'branches.zzz': 'zzz' is not .* It has length, older, leaves\.$"):
            tree.get_attribute_metadata("branches.zzz")

    def test_metadata_check_values(self, tree):
        found = tree.get_attribute_metadata("branches.length")
        assert found.check_type(3)
        with pytest.raises(TypeError, match="must be of type int"):
            found.check_type(3.0)


class TestDeprecation:
    def test_setting_a_deprecated_attribute_warns(self, tree, caplog):
        tree.branches.older = 3
        assert caplog.messages == ["branches.older has been deprecated: use length."]

    def test_setting_other_attributes_does_not_warn(self, tree, caplog):
        tree.branches.length = 3
        assert caplog.messages == []


class TestDictionaries:
    def test_dictionaries_have_full_names_and_numbers_for_enums(self, tree):
        tree.branches.leaves.colour = Colour.BLUE
        found = tree.to_dict()
        assert list(found) == [
            *("height", "rings", "names", "branches.length", "branches.older"),
            *("branches.leaves.colour", "branches.leaves.mixed"),
            *("roots.length", "roots.older", "roots.leaves.colour", "roots.leaves.mixed"),
        ]
        assert found["branches.leaves.colour"] == 7

    def test_dictionaries_are_copies(self, tree):
        tree.to_dict()["names"]["de"] = "Baum"
        assert tree.names == {}
        tree.from_dict({**tree.to_dict(), "height": (ring := [1])})
        ring.append(2)
        assert tree.height == [1]

    def test_dictionaries_restore_all_values(self, tree, caplog):
        tree.height, tree.branches.leaves.colour, tree.branches.leaves.mixed = [2, 3], Colour.BLUE, Colour.RED
        again = Tree()
        again.from_dict(tree.to_dict())
        assert again == tree
        assert again.branches.leaves.mixed is Colour.RED
        assert caplog.messages == []

    def test_a_category_takes_its_part(self, tree):
        tree.branches.length = 9
        other = Tree()
        other.branches.from_dict(tree.to_dict())
        other.roots.leaves.from_dict({"roots.leaves.colour": 7, "roots.leaves.mixed": False})
        assert (other.branches.length, other.roots.length, other.roots.leaves.colour) == (9, 1, Colour.BLUE)

    def test_a_missing_value_stays_with_a_warning(self, tree, caplog):
        tree.branches.length = 9
        tree.from_dict({name: value for name, value in Tree().to_dict().items() if name != "branches.length"})
        assert tree.branches.length == 9
        assert caplog.messages == ["branches.length didn't have a value: the existing value will be retained"]

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            ({"branches.length": "9"}, TypeError, "Trying to set branches.length to '9'"),
            (
                {"branches.leaves.colour": 3},
                ValueError,
                r"leaves.colour is 3; it must be one of 0 \(RED\), 7 \(BL",
            ),
            ({"branches.lengt_h": 3}, ValueError, "'branches.lengt_h' is not .* Did you mean 'branches.length'"),
        ],
    )
    def test_one_refused_value_leaves_all_values_unset(self, tree, change, error, words):
        with pytest.raises(error, match=words):
            tree.from_dict({**tree.to_dict(), "height": 8, **change})
        assert tree == Tree()

    def test_a_tree_is_written_as_json(self, tree):
        tree.height = "high"
        assert json.loads(tree.to_json())["height"] == "high"

    @pytest.mark.parametrize("text", ["[1]", "{", "3"])
    def test_text_that_is_no_json_object_is_refused(self, tree, text):
        with pytest.raises(ValueError, match="JSON of a configuration is|Expecting"):
            tree.from_json(text)


def test_the_text_of_a_tree_has_a_line_for_each_attribute(tree):
    assert str(tree.roots.leaves) == "roots.leaves.colour = Colour.RED\nroots.leaves.mixed = False"
    assert repr(tree.roots.leaves) == "roots.leaves:\n  roots.leaves.colour = Colour.RED\n  roots.leaves.mixed = False"
    assert repr(tree).startswith("Tree:\n  height = 1\n")


def test_dir_lists_the_attributes(tree):
    assert {"length", "older", "leaves"} <= set(dir(tree.branches))
    assert "colour" not in dir(tree.branches)


def test_copies_are_equal_until_one_changes(tree):
    other = copy.deepcopy(tree)
    assert other == tree
    other.branches.leaves.colour = Colour.BLUE
    assert other != tree
    assert tree != "a tree"
