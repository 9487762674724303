"""What to try next with a step, each with the line of code to write: rules on a few facts, most gain first."""

from __future__ import annotations

from dataclasses import dataclass

from wholestep.ir.step_graph import shown

_LARGE_SHARE = 0.05
_MUCH_SAVED = 0.3
_MANY_NODES = 400


@dataclass(frozen=True)
class Advice:
    """One thing to try."""

    title: str
    text: str
    code: str


@dataclass(frozen=True)
class Facts:
    """What the rules read."""

    name: str
    """Of the step, as code would write it."""
    lower: str
    step_us: float
    exposed_us: float
    worst: str
    """The collective with the most exposed time, and why it is exposed."""
    worst_reason: str
    collectives: int
    passes: tuple[str, ...]
    peak: int
    saved: int
    """Bytes of saved activations at the peak."""
    saved_example: str
    has_budget: bool
    recompiles: tuple[str, ...]
    outside: tuple[tuple[str, float], ...]
    """Reasons why operators are in no compiled region, with their predicted time, most first."""
    optimizer_nodes: int
    measured: bool


def advice(facts: Facts) -> list[Advice]:
    """What to try, in the order in which a person would."""
    found = [*_communication(facts), *_recompiles(facts), *_lowering(facts), *_memory(facts), *_optimizer(facts)]
    if facts.lower and not facts.measured:
        found.append(
            Advice(
                "Measure it",
                "The times of this page are predicted. A profile puts the measured ones beside them.",
                f'{facts.name}.report("step.html", profile={facts.name}.profile(*args))',
            )
        )
    found.append(
        Advice(
            "Check it against eager",
            "Runs eager and compiled side by side from the same state and names what differs, with the line.",
            f"print(ws.check({facts.name}, *args))",
        )
    )
    return found


def _communication(facts: Facts) -> list[Advice]:
    share = facts.exposed_us / facts.step_us if facts.step_us else 0.0
    if share < _LARGE_SHARE:
        return []
    text = f"For {share:.0%} of the step, computation stands still for communication. The longest: {facts.worst}."
    if "overlap_communication" not in facts.passes:
        code = 'ws.compile(train_step, parallel=plan, passes="auto")  # overlap_communication'
        return [Advice("Hide communication behind computation", text, code)]
    if facts.worst_reason in ("start", "dependence"):
        passes = '["overlap_communication", "overlap_optimizer_with_next_forward"]'
        code = f"ws.compile(train_step, parallel=plan, passes={passes})"
        return [Advice("Start communication in the step before", text, code)]
    if facts.worst_reason == "link":
        code = "ws.FullyShard(mesh, modules=[...])  # larger units: fewer, longer collectives"
        return [Advice("The link is busy: communicate less", text, code)]
    return [Advice("Communication is exposed", text, "print(ws.simulate.step(graph).exposed())")]


def _recompiles(facts: Facts) -> list[Advice]:
    shapes = [reason for reason in facts.recompiles if "shape" in reason or "size" in reason]
    if len(shapes) < 2:
        return []
    text = f"{len(shapes)} of {len(facts.recompiles) + 1} captures happened because a size changed: {shapes[-1]}."
    code = 'ws.compile(train_step, dynamic={"batch": {0: ws.Dim(min=1, max=64)}})'
    return [Advice("One graph for all sizes", text, code)]


def _lowering(facts: Facts) -> list[Advice]:
    if facts.lower == "eager":
        text = "The step runs operator by operator, to the bit as eager does. Compiled, it agrees within rounding."
        return [Advice("Compile it", text, 'ws.compile(train_step, lower="inductor")')]
    found = [(reason, us) for reason, us in facts.outside if us > _LARGE_SHARE * facts.step_us]
    if not found or facts.lower != "inductor":
        return []
    reason, us = found[0]
    text = f"{us / facts.step_us:.0%} of the predicted time are operators in no compiled region: {reason}."
    return [Advice("See what was not compiled", text, f"print({facts.name}.lowering)")]


def _memory(facts: Facts) -> list[Advice]:
    if facts.has_budget or not facts.peak or facts.saved < _MUCH_SAVED * facts.peak:
        return []
    text = (
        f"{shown(facts.saved)} of the peak of {shown(facts.peak)} are activations saved for the backward, the largest "
        f"{facts.saved_example}. A budget recomputes what is cheap."
    )
    budget = facts.peak - facts.saved // 2
    amount = f"{budget / 2**30:.1f}GiB" if budget >= 2**30 else f"{max(budget >> 20, 1)}MiB"
    return [Advice("Train in less memory", text, f'ws.compile(train_step, memory_budget="{amount}")')]


def _optimizer(facts: Facts) -> list[Advice]:
    if facts.optimizer_nodes < _MANY_NODES or facts.lower == "inductor":
        return []
    text = f"The optimizer is {facts.optimizer_nodes} operators. Fused, it is one for all parameters."
    return [Advice("Use the fused optimizer", text, "torch.optim.AdamW(model.parameters(), lr=lr, fused=True)")]
