"""Run a graph before and after a pass on the same real tensors; compare the results as closely as its contract says.

    exact            the same bits, and no result that has become one of the inputs
    reassociates     as far apart as sums in another order may be: some rounding errors of the largest element, and what
                     rounding errors of the inputs change by themselves (`nudged`)
    approximates     at most `bound` times as far from the float64 run of the graph before (`InFloat64`) as that
                     graph was, on these inputs or on nudged ones; float64 results, and those of which that run is no
                     reference, are held to `reassociates`

Inputs are generated (`draws`) for a graph of which only shapes and dtypes are known, in several kinds from the
likeliest to the safest. If an operator refuses one (an index out of range, a matrix that is not positive definite),
or the result has NaNs (the logarithm of a negative number), the next kind is tried. A graph that runs on none of them
is not replayed; the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import VerifyError
from wholestep.ir.effects import may_draw
from wholestep.ir.meta import node_meta
from wholestep.passes.engine.contract import Approximates, Numerics
from wholestep.passes.engine.pretend_ranks import PretendRanks
from wholestep.passes.plain_collectives import known_or_noted
from wholestep.torch_private.fx_graphs import pytree

log = logging.getLogger("wholestep.passes")

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

SEED = 20261115

Draw = Callable[[list[int], torch.Generator], Tensor]


def _near_one(shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64).add_(0.1)


def _normal(shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _large(shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64).mul_(10).add_(6)


def _like_identity(shape: list[int], generator: torch.Generator) -> Tensor:
    """Symmetric, positive definite and, where possible, not the identity."""
    if len(shape) < 2 or shape[-1] != shape[-2]:
        return _near_one(shape, generator)
    noise = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.1
    return (noise + noise.mT) / 2 + torch.eye(shape[-1], dtype=torch.float64) * (1 + 0.2 * shape[-1])


def _zeros(shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _zero_or_one(shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.float64)


_DRAWS: tuple[tuple[str, Draw, Draw], ...] = (
    ("near 1, whole numbers 0 and 1", _near_one, _zero_or_one),
    ("near 1, whole numbers 0", _near_one, _zeros),
    ("normal", _normal, _zeros),
    ("between 6 and 16", _large, _zeros),
    ("symmetric and positive definite", _like_identity, _zeros),
    ("zero", _zeros, _zeros),
)


def draws(graph: fx.Graph) -> Iterator[tuple[str, list[Any]]]:
    """Inputs for the placeholders, with a name for the kind."""
    values = [known_or_noted(node) for node in graph.find_nodes(op="placeholder")]
    for name, floats, integers in _DRAWS:
        generator = torch.Generator().manual_seed(SEED)
        yield name, [_made_up(value, floats, integers, generator) for value in values]


def nudged(inputs: list[Any]) -> list[Any]:
    """The same inputs with every float changed by a rounding error: differences that this causes are ignored."""
    generator = torch.Generator().manual_seed(SEED)
    return [_nudged(value, generator) if isinstance(value, Tensor) else value for value in inputs]


def _nudged(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    size = 2 * torch.finfo(tensor.dtype).eps
    signs = (torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1).to(tensor.device)
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(wide * (1 + size * signs))


def _made_up(value: Any, floats: Draw, integers: Draw, generator: torch.Generator) -> Any:
    if isinstance(value, Tensor):
        shape = [_size(s) for s in value.shape]
        if value.is_complex():
            data = torch.complex(floats(shape, generator), floats(shape, generator))
        elif value.is_floating_point():
            data = floats(shape, generator)
        elif value.dtype is torch.bool:
            data = _mask(shape, generator)
        else:
            data = integers(shape, generator)
        made = torch.empty_strided(shape, [_size(s) for s in value.stride()], dtype=value.dtype)
        return made.copy_(data)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    return value if value is not None else 0.5


def _mask(shape: list[int], generator: torch.Generator) -> Tensor:
    """Mostly true, and never false along a whole row: a softmax over nothing is NaN. A single flag is false."""
    if not shape:
        return torch.zeros(shape)
    mask = torch.rand(shape, generator=generator) < 0.75
    mask[..., :1] = True
    return mask


def _size(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint)


_ROUNDINGS = 32
"""How many rounding errors of the largest element sums in another order may be apart; half types: a fraction of it."""
_ROUNDINGS_OF_RESULT = 4
"""The same where a float64 run says how far off the graph was: only roundings of the result itself; half types: one."""
_SANE = 0.05
"""How far a graph may be from its float64 run, relative to the largest element or to 1, for that to be a reference."""
_NOISE = 64
"""How many times the effect of one rounding error of each input they may differ by."""
_AT_MOST = 1e-4
"""An upper limit for noisy steps, relative to the largest element (or to 1)."""


@dataclass
class _Results:
    """The results of one run: outputs, contents of the inputs afterwards, and the inputs that each output shares memory
    with."""

    outputs: list[Any]
    inputs: list[Any]
    inside: list[set[int]]


@dataclass
class _Trial:
    name: str
    inputs: list[Any]
    before: _Results
    nudged: _Results | None = None
    reference: _Results | None = None
    """The same in float64."""


class Replay:
    """What a graph computes from generated inputs."""

    def __init__(self, gm: fx.GraphModule, name: str = "the pass", *, numerics: Numerics = "reassociates") -> None:
        """`numerics`: what it will be compared for; a weaker contract needs more runs."""
        self._trials: list[_Trial] = []
        error: Exception | None = None
        for called, inputs in draws(gm.graph):
            try:
                trial = _Trial(called, inputs, _run(gm, inputs))
            except Exception as raised:  # any error of an operator about unsuitable inputs
                error = raised if error is None else error
                continue
            if _all_finite(trial.before):
                self._trials = [trial]
                break
            self._trials.append(trial)
        if not self._trials:
            self._give_up(gm, name, error)
        for trial in self._trials if numerics != "exact" else ():
            try:
                trial.nudged = _run(gm, nudged(trial.inputs))
            except Exception:  # nudged inputs are invalid: nothing is known about noise
                log.debug("inputs %s with rounding errors do not run", trial.name, exc_info=True)
            if isinstance(numerics, Approximates):
                trial.reference = _in_float64(gm, trial.inputs, name)

    @staticmethod
    def _give_up(gm: fx.GraphModule, name: str, error: Exception | None) -> None:
        unknown = [n.name for n in gm.graph.find_nodes(op="placeholder") if n.meta.get("val") is None]
        what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        hint = f' Set node.meta["val"] of {", ".join(unknown[:8])}.' if unknown else ""
        log.warning("%s is not replayed: the graph does not run on made-up inputs (%s).%s", name, what, hint)

    def compare(self, gm: fx.GraphModule, numerics: Numerics) -> None:
        """Raise VerifyError if the results differ by more than the contract allows."""
        for trial in self._trials:
            after = _run(gm, trial.inputs)
            if len(after.outputs) != len(trial.before.outputs):
                raise VerifyError(
                    f"the graph has {len(after.outputs)} outputs, before the pass it had {len(trial.before.outputs)}.",
                    node=gm.graph.output_node().name,
                )
            _compare(gm, numerics, trial, after)


def _compare(gm: fx.GraphModule, numerics: Numerics, trial: _Trial, after: _Results) -> None:
    outputs, inputs = _names(gm)
    nothing = _Results([None] * len(outputs), [None] * len(inputs), [])
    noise, wide = trial.nudged or nothing, trial.reference or nothing
    for (what, node), old, new, noisy, reference in (
        *zip(outputs, trial.before.outputs, after.outputs, noise.outputs, wide.outputs, strict=True),
        *zip(inputs, trial.before.inputs, after.inputs, noise.inputs, wide.inputs, strict=True),
    ):
        if not _same(old, new, noisy, numerics, reference):
            _fail(
                f"{what} has other values than before the pass, which promises numerics={numerics!r}: "
                f"{_difference(old, new)}.",
                node,
            )
    for (what, node), old_inside, new_inside in zip(outputs, trial.before.inside, after.inside, strict=True):
        for i in sorted(new_inside - old_inside):
            _fail(f"{what} now shares its memory with {inputs[i][0]} and did not before the pass.", node)


def _fail(what: str, node: fx.Node | None) -> None:
    location = node_meta(node).location if node is not None else None
    raise VerifyError(what, node=node.name if node is not None else "", location=location)


def _in_float64(gm: fx.GraphModule, inputs: list[Any], name: str) -> _Results | None:
    """The results of a graph in float64; None if it does not run so."""
    wide = [widened_tensor(value) if isinstance(value, Tensor) else value for value in inputs]
    try:
        return _run(gm, wide, InFloat64)
    except Exception as error:  # bits are read as another dtype, a custom operator wants its own: any error
        log.warning("%s is compared without a float64 run, which raised %s", name, type(error).__name__)
        return None


def _run(gm: fx.GraphModule, inputs: list[Any], interpreter: type[PretendRanks] = PretendRanks) -> _Results:
    own = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    kept = [(tensor, tensor.detach().clone()) for tensor in (*gm.parameters(), *gm.buffers()) if not _is_fake(tensor)]
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(SEED)
        # Some operators keep what their backward needs only if gradients are on (mkldnn's RNN).
        with torch.set_grad_enabled(not any(p.requires_grad for p in gm.parameters())):
            result = interpreter(gm).run(*own, enable_io_processing=False)
    finally:
        torch.random.set_rng_state(state)
        with torch.no_grad():
            for tensor, content in kept:
                if not torch.equal(tensor, content):
                    tensor.copy_(content)
    outputs = leaves_of_output(result)
    return _Results([_copied(value) for value in outputs], own, [_inside(value, own) for value in outputs])


def _is_fake(tensor: Tensor) -> bool:
    return tensor.is_meta or type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _copied(value: Any) -> Any:
    """A copy of a result: the original may be written through another one."""
    return value.clone() if isinstance(value, Tensor) else value


def leaves_of_output(value: Any) -> list[Any]:
    """The values of an output node, including None."""
    return pytree.tree_leaves(value, is_leaf=lambda leaf: leaf is None)


def _inside(value: Any, inputs: list[Any]) -> set[int]:
    """Which inputs a result shares memory with."""
    memory = _memory(value)
    return set() if not memory else {i for i, given in enumerate(inputs) if _memory(given) == memory}


def _memory(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) and value.layout is torch.strided else 0


Named = tuple[str, fx.Node | None]


def _names(gm: fx.GraphModule) -> tuple[list[Named], list[Named]]:
    outputs = leaves_of_output(gm.graph.output_node().args[0])
    results = [(f"output {i}", value if isinstance(value, fx.Node) else None) for i, value in enumerate(outputs)]
    return results, [(f"input {n.name}, after the step,", n) for n in gm.graph.find_nodes(op="placeholder")]


def _all_finite(results: _Results) -> bool:
    floats = [v for v in (*results.outputs, *results.inputs) if isinstance(v, Tensor) and _is_inexact(v)]
    return all(bool(value.isfinite().all()) for value in floats)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _same(before: Any, after: Any, noisy: Any, numerics: Numerics, reference: Any = None) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        noise = torch.tensor(noisy, dtype=torch.float64) if isinstance(noisy, float) else None
        one, other = (torch.tensor(value, dtype=torch.float64) for value in (before, after))
        return _close(one, other, noise, numerics, torch.float32)
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return type(before) is type(after) and bool(before == after)
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    if not _is_inexact(before):
        # Where a rounding error changes an integer (the index of a maximum), another order of a sum may too.
        unstable = numerics != "exact" and isinstance(noisy, Tensor) and not torch.equal(before, noisy)
        return unstable or torch.equal(before, after)
    noise, wide = (
        widened(value) if isinstance(value, Tensor) and value.shape == before.shape else None
        for value in (noisy, reference)
    )
    return _close(widened(before), widened(after), noise, numerics, before.dtype, wide)


def widened(tensor: Tensor) -> Tensor:
    """A tensor in float64; a complex one as pairs."""
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.to(torch.float64)


def _close(
    before: Tensor,
    after: Tensor,
    noisy: Tensor | None,
    numerics: Numerics,
    dtype: torch.dtype,
    reference: Tensor | None = None,
) -> bool:
    differ = ~((before == after) | (before.isnan() & after.isnan()))
    if numerics == "exact" or not bool(differ.any()):
        return not bool(differ.any())
    gap = (before - after).abs()[differ]
    largest = float(before[before.isfinite()].abs().max()) if bool(before.isfinite().any()) else 0.0
    eps = torch.finfo(dtype).eps
    roundings = _ROUNDINGS * eps if eps < 1e-4 else 4 * eps
    limit = max(_AT_MOST, roundings) * max(1.0, largest)
    if isinstance(numerics, Approximates) and reference is not None and eps > torch.finfo(torch.float64).eps:
        was = max(_apart(before, reference), 0.0 if noisy is None else _apart(noisy, reference))
        if was <= _SANE * max(1.0, largest):
            allowed = numerics.bound * was + (_ROUNDINGS_OF_RESULT * eps if eps < 1e-4 else eps) * largest
            return bool(((after - reference).abs()[differ] <= allowed).all())
    noise = _apart(before, noisy) if noisy is not None else 0.0
    allowed = roundings * largest + min(_NOISE * noise, limit)
    return bool((gap <= allowed).all())  # a NaN gap is not allowed


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().nan_to_num(0, 0, 0).max())


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape:
        different = before != after
        gap = (widened(before) - widened(after)).abs().max().item() if before.numel() else 0.0
        return f"{int(different.sum())} of {before.numel()} elements differ, by at most {gap:.3g}"
    return f"{before!r:.80} became {after!r:.80}"


class InFloat64(PretendRanks):
    """Interprets a graph module with every float in float64: the reference for `approximates(bound)`.

        before, bf16 and f32                       reference
        a = _to_copy(x, dtype=bfloat16)            a = _to_copy(x, dtype=float64)
        y = mm(a, w)                               y = mm(a, w)
        p = native_dropout(y, 0.1, True)           p = the result of native_dropout on the recorded dtype of y, widened

    Inputs and constants are widened, dtype arguments become float64, and so does every result. What draws random
    numbers runs in the dtype that the graph had, since another dtype draws others; so does an operator that refuses
    float64.
    """

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        return _map_tensors(widened_tensor, super().run_node(n))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if may_draw(target):
            return self._in_recorded_dtype(target)
        try:
            return super().call_function(target, _widened_dtypes(args), _widened_dtypes(kwargs))
        except (RuntimeError, NotImplementedError):  # the operator has no kernel for float64
            return self._in_recorded_dtype(target)

    def _in_recorded_dtype(self, target: Any) -> Any:
        def value_of(source: fx.Node) -> Any:
            was, now = source.meta.get("val"), self.env[source]
            return now.to(was.dtype) if isinstance(was, Tensor) and was.dtype in _WIDE else now

        args, kwargs = fx.map_arg((self._node.args, self._node.kwargs), value_of)
        return super().call_function(target, args, kwargs | ({"device": "cpu"} if "device" in kwargs else {}))


def widened_tensor(tensor: Tensor) -> Tensor:
    """The tensor in float64 or complex128 with the same strides; itself if it is not rounded."""
    wide = _WIDE.get(tensor.dtype)
    return tensor if wide is None else tensor.to(wide)


def _widened_dtypes(arguments: Any) -> Any:
    return pytree.tree_map(lambda leaf: _WIDE.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf, arguments)


def _map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    return pytree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)
