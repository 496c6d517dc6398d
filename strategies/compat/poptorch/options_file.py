"""Options in a file, written as lines of a program; a line can set an option and cannot run any other code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from enum import Enum

import torch

import strategies.compat.poptorch.blocks as blocks
import strategies.compat.poptorch.enums as enums
from strategies.compat.poptorch.option_groups import OptionGroup, TensorLocationSettings

_DTYPES = ("bfloat16", "float16", "float32")
_STAGES = (blocks.ParallelPhasedExecution, blocks.Phase, blocks.PipelinedExecution)
_SHARDS = (blocks.SerialPhasedExecution, blocks.ShardedExecution, blocks.Stage)
_MADE_OF: Mapping[str, type] = {kind.__name__: kind for kind in (*_STAGES, *_SHARDS, TensorLocationSettings)}
"""Classes that a line may instantiate, as in `poptorch.Stage("B1")`."""
_METHODS = {blocks.Stage: ("ipu",), blocks.Phase: ("ipus",)}
_OF_A_FILE = ("from_json", "loadFromFile")


def set_from_line(options: OptionGroup, line: str) -> None:
    """Set the option in a line such as `Training.gradientAccumulation(4)`, with literals and names of `poptorch`.

    Raises:
        SyntaxError, NameError, AttributeError, TypeError, ValueError: If the line is anything else.
    """
    call = ast.parse(line, mode="eval").body
    if not isinstance(call, ast.Call):
        raise SyntaxError("the line does not call an option")
    _called(call, options)


def set_from_value(options: OptionGroup, name: str, value: object) -> None:
    """Set an option by its name, with dots for groups, from a JSON value; a list holds several arguments.

    Raises:
        AttributeError: If no option has this name.
    """
    *groups, method = name.split(".")
    owner: object = options
    for group in groups:
        owner = _option_of(owner, group)
    arguments = value if isinstance(value, list) else [value]
    _option_of(owner, method)(*(_enum_named(each) for each in arguments))


def _called(call: ast.Call, options: OptionGroup | None = None) -> object:
    function = _function(call.func, options)
    named = {each.arg: _value(each.value) for each in call.keywords if each.arg}
    if len(named) != len(call.keywords) or any(isinstance(each, ast.Starred) for each in call.args):
        raise SyntaxError("write all arguments out, without * and **")
    return function(*map(_value, call.args), **named)


def _function(node: ast.expr, options: OptionGroup | None) -> Callable[..., object]:
    """Return the callable of a call: an option, a class of `_MADE_OF`, or a method of an object made by a call."""
    match node:
        case ast.Name(name) if options is not None:
            return _option_of(options, name)
        case ast.Attribute(ast.Name("poptorch"), name):
            if name not in _MADE_OF:
                raise NameError(f"a file cannot make poptorch.{name}; it can make {', '.join(_MADE_OF)}")
            return _MADE_OF[name]
        case ast.Attribute(ast.Name(group), name) if options is not None:
            return _option_of(_option_of(options, group), name)
        case ast.Attribute(ast.Call() as call, name):
            return _option_of(_called(call, options), name)
    raise SyntaxError("the line does not call an option: write an option, or a group and an option, before the (")


def _option_of(owner: object, name: str) -> Callable[..., object]:
    known = _METHODS.get(type(owner), ())
    is_option = isinstance(owner, OptionGroup) and (name == "_Popart" or not name.startswith("_"))
    if not (is_option or name in known) or name in _OF_A_FILE:
        raise AttributeError(f"{name} is not an option for files")
    option: Callable[..., object] = getattr(owner, name)
    return option


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Call):
        return _called(node)
    if isinstance(node, ast.Attribute):
        return _named(ast.unparse(node))
    if isinstance(node, ast.List | ast.Tuple):
        values = [_value(each) for each in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)
    if isinstance(node, ast.Dict):
        keys = [_value(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    return ast.literal_eval(node)


def _named(words: str) -> object:
    """Return the member of an enumeration of `poptorch`, or the dtype of `torch`, with this name."""
    match words.split("."):
        case ["poptorch", kind, name]:
            return _member(kind, name, words)
        case ["torch", name] if name in _DTYPES:
            return getattr(torch, name)
    raise NameError(f"a file cannot use the name {words}; write for example poptorch.OutputMode.All or torch.float16")


def _member(kind: str, name: str, words: str) -> Enum:
    found = getattr(enums, kind, None)
    if not (isinstance(found, type) and issubclass(found, Enum) and name in found.__members__):
        raise NameError(f"{words} is not a member of an enumeration of poptorch")
    return found[name]


def _enum_named(value: object) -> object:
    if isinstance(value, str) and value.count(".") == 1:
        kind, name = value.split(".")
        return _member(kind, name, f"poptorch.{value}") if isinstance(getattr(enums, kind, None), type) else value
    return value
