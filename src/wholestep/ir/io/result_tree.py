"""What the user's function returned, described in JSON with the graph's outputs as leaves.

    {'loss': <tensor>, 'n': 3}      {"dict": [["loss", {"output": 0}], ["n", {"value": 3}]]}
    (a, b) and [a, b]               {"tuple": [..]}, {"list": [..]}
    another pytree class            {"node": "collections.OrderedDict", "keys": [..], "children": [..]}
    an object that is not JSON      {"object": "pathlib.PosixPath"}
    a number read after the run     {"deferred": [0]}: of output 0

The description is for files and for people; the runtime rebuilds the value from torch's own tree spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wholestep.errors import GraphFormatError
from wholestep.torch_private.fx_graphs import pytree_children

_SCALARS = (int, float, str, bool, type(None))
_MAX_DEPTH = 100


def describe(tree: object, is_tensor_output: Callable[[object], int | dict[str, Any] | None]) -> dict[str, Any]:
    """The description of a result.

    `is_tensor_output` returns the output number of a leaf, None if it is not an output, or the description of a leaf
    that stands for another value (see `describe_leaf`).
    """
    output = is_tensor_output(tree)
    if output is not None:
        return output if isinstance(output, dict) else {"output": output}
    children = pytree_children(tree)
    if children is None:
        return describe_leaf(tree)
    described = [describe(child, is_tensor_output) for child in children]
    if type(tree) is tuple:
        return {"tuple": described}
    if type(tree) is list:
        return {"list": described}
    keys = [key if type(key) in _SCALARS else repr(key) for key in tree] if isinstance(tree, Mapping) else None
    if keys is not None and len(keys) != len(described):
        keys = None
    if type(tree) is dict and keys is not None:
        return {"dict": [list(pair) for pair in zip(keys, described, strict=True)]}
    node: dict[str, Any] = {"node": _class_name(tree)}
    if keys is not None:
        node["keys"] = keys
    return node | {"children": described}


def describe_leaf(value: object) -> dict[str, Any]:
    """The description of a leaf that is not an output."""
    return {"value": value} if type(value) in _SCALARS else {"object": _class_name(value)}


def describe_deferred(outputs: list[int]) -> dict[str, Any]:
    """The description of a value that is made after the graph ran, of some of its outputs."""
    return {"deferred": outputs}


def render(description: Any) -> str:
    """A short text such as `{'loss': out0, 'n': 3}`."""
    if not isinstance(description, Mapping):
        return repr(description)
    if "output" in description:
        return f"out{description['output']}"
    if "value" in description:
        return repr(description["value"])
    if "tuple" in description:
        items = [render(child) for child in description["tuple"]]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if "list" in description:
        return f"[{', '.join(render(child) for child in description['list'])}]"
    if "dict" in description:
        return "{" + ", ".join(f"{key!r}: {render(child)}" for key, child in description["dict"]) + "}"
    if "node" in description:
        items = [render(child) for child in description["children"]]
        if "keys" in description:
            items = [f"{key}={item}" for key, item in zip(description["keys"], items, strict=True)]
        return f"{description['node'].rsplit('.', 1)[-1]}({', '.join(items)})"
    if "deferred" in description:
        return f"read after the run from {', '.join(f'out{i}' for i in description['deferred']) or 'Python'}"
    return f"<{description.get('object', '?')}>"


def check(description: Any, outputs: int, depth: int = 0) -> None:
    """Raise GraphFormatError unless this is a description over that many outputs."""
    if description is None and depth == 0:
        return
    if not isinstance(description, dict) or depth > _MAX_DEPTH:
        raise GraphFormatError("the description of the step's result is damaged.")
    tags = set(description) - {"keys", "children"}
    [tag] = tags if len(tags) == 1 else [None]
    content: Any = description.get(tag)
    keys = description.get("keys")
    children: Any = ()
    if tag == "output":
        good = type(content) is int and 0 <= content < outputs
    elif tag == "value":
        good = type(content) in _SCALARS
    elif tag == "deferred":
        good = isinstance(content, list) and all(type(each) is int and 0 <= each < outputs for each in content)
    elif tag == "object":
        good = isinstance(content, str)
    elif tag in ("tuple", "list"):
        good, children = isinstance(content, list), content
    elif tag == "dict":
        good = isinstance(content, list) and all(
            isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in _SCALARS for pair in content
        )
        children = [pair[1] for pair in content] if good else ()
    else:
        children = description.get("children")
        good = tag == "node" and isinstance(content, str) and isinstance(children, list)
        good = good and (keys is None or (isinstance(keys, list) and len(keys) == len(children)))
        good = good and (keys is None or all(type(key) in _SCALARS for key in keys))
    if not good:
        raise GraphFormatError(f"the description of the step's result is damaged at {tag!r}.")
    for child in children:
        check(child, outputs, depth + 1)


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
