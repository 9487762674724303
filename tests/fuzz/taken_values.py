"""Values that a step takes out of tensors (`.item()`, `tolist`): returned, kept, computed with, branched on."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.program import Builder

_FLOATS = (
    "loss.item()",
    "float(loss)",
    "loss.detach().item()",
    "loss.detach().cpu().item()",
    "float(h.detach().mean())",
    "h.detach().abs().max().item()",
    "h.detach().norm().item()",
    "(h.detach() > 0).float().mean().item()",
    "h.detach().sum(0).tolist()[1]",
    "x.std().item()",
    "h[0, 0].item()",
    "torch.stack([loss.detach(), h.detach().mean()]).tolist()[0]",
    "sum(h.detach().mean(0).tolist())",
)
_WHOLE = (
    "(h.argmax(1) == x.argmax(1)).sum().item()",
    "int((h > 0).sum())",
    "h.argmax().item()",
    "int(h.detach().abs().max() * 10)",
    "(h.argmax(1) == x.argmax(1)).long().tolist()[0]",
    "torch.count_nonzero(h > 0.1).item()",
)


def _taken(b: Builder) -> str:
    return b.rng.choice(_FLOATS if b.chance(0.7) else _WHOLE)


def returned(b: Builder) -> None:
    form = b.rng.choice(
        (
            "{v}",
            "{v} * 2",
            "round({v}, 3)",
            "-{v}",
            "{v} / x.shape[0]",
            "[{v}, 1]",
            "{{'v': {v}}}",
            "({v}, loss)",
            "abs({v})",
            "{v} ** 2",
            "{v} + {v}",
            "int({v})",
            "float({v})",
            "{v} > 0",
            "1 - {v}",
            "math.sqrt(abs({v}))",
        )
    )
    b.returns.append((b.name("value"), form.format(v=_taken(b))))


def total(b: Builder) -> None:
    """A sum that is kept between calls."""
    name = b.name("total")
    b.setup.append(f"{name} = 0.0")
    b.assigned_in_step.add(name)
    b.step("end", f"{name} {b.rng.choice(('+=', '+=', '-='))} {_taken(b)}")
    if b.chance(0.5):
        b.returns.append((name, name))
    if b.chance(0.3):
        b.after(f"{name} = 0.0 if i == 2 else {name}")
        b.assigned_between.add(name)


def meter(b: Builder) -> None:
    name = b.name("Meter")
    low = name.lower()
    average = b.rng.choice(("self.sum / self.count", "self.sum / max(1, self.count)", "self.sum * 0.5 + self.value"))
    b.add_top(
        f"""
class {name}:
    def __init__(self):
        self.value = self.average = self.sum = 0
        self.count = 0

    def update(self, value, n=1):
        self.value = value
        self.sum += value * n
        self.count += n
        self.average = {average}
"""
    )
    b.setup.append(f"{low} = {name}()")
    b.step("end", f"{low}.update({_taken(b)}{b.rng.choice(('', ', x.shape[0]', ', n=2'))})")
    if b.chance(0.6):
        b.returns.append((low, f"{low}.{b.rng.choice(('average', 'value', 'sum', 'count'))}"))


def running_average(b: Builder) -> None:
    """A value that is kept, and used in the loss of the next call."""
    name = b.name("ema")
    b.setup.append(f"{name} = {b.rng.choice(('0.0', '1.0', 'None'))}")
    b.assigned_in_step.add(name)
    first = f"0.5 if {name} is None else {name}"
    use = b.rng.choice(("loss * (1 + 0.1 * ({a}))", "loss + h.mean() * ({a})", "torch.add(loss, h.mean(), alpha={a})"))
    b.step("loss", f"loss = {use.format(a=first)}")
    b.step("end", f"{name} = 0.9 * ({first}) + 0.1 * {_taken(b)}")


def module_statistic(b: Builder) -> None:
    b.net_init.append("self.statistic = 0.0")
    b.net_forward.append(f"self.statistic = {b.rng.choice(('h.abs().mean().item()', 'float(h.detach().max())'))}")
    if b.chance(0.5):
        b.returns.append(("statistic", "model.statistic"))


def accuracy(b: Builder) -> None:
    state = b.name("score")
    b.setup.append(f"{state} = types.SimpleNamespace(right=0, seen=0)")
    b.step("end", f"{state}.right += {b.rng.choice(_WHOLE[:2])}", f"{state}.seen += x.shape[0]")
    b.returns.append(("accuracy", f"{state}.right / {state}.seen"))


def used_in_tensor(b: Builder) -> None:
    """The number goes back into the graph."""
    name = b.name("value")
    b.step("loss", f"{name} = {_taken(b)}")
    use = b.rng.choice(
        (
            "loss * {v}",
            "loss + {v}",
            "loss / (1 + {v})",
            "loss + (h * {v}).mean()",
            "loss + torch.tensor({v})",
            "loss + torch.full((2,), {v}).sum()",
            "loss + torch.add(h, h.detach(), alpha={v}).mean()",
            "loss - {v} ** 2",
            "loss + h.clamp(-{v} - 1, {v} + 1).mean()",
            "loss + torch.lerp(h, h.detach(), {v}).mean()",
        )
    )
    b.step("loss", f"loss = {use.format(v=name)}")


def learning_rate_from_loss(b: Builder) -> None:
    b.step("update", "for group in optimizer.param_groups:", f"    group['lr'] = 0.01 / (1 + abs({_taken(b)}))")


def decided(b: Builder) -> None:
    """Python needs the value at once: refused."""
    form = b.rng.choice(
        (
            "if {v} > 0.5:\n    loss = loss * 2",
            "loss = loss * max({v}, 0.5)",
            "loss = loss * (1, 2)[int({v} > 0)]",
            "assert {v} == {v}",
            "if not math.isfinite({v}):\n    raise ValueError('not finite')",
            "text = f'{{{v}:.2f}}'",
            "text = '%.3f' % {v}",
            "loss = loss + h[:, : int({v}) % 3].sum()",
            "name = {{0: 'zero'}}.get(int({v}), 'more')",
            "np.exp({v})",
            "hash({v})",
            "for j in range(min(3, int(abs({v})))):\n    loss = loss * 1.5",
        )
    )
    b.step("loss", form.format(v=_taken(b)))


def best(b: Builder) -> None:
    """`if loss.item() < best`: refused; `torch.minimum` is not."""
    name = b.name("best")
    if b.chance(0.5):
        b.setup.append(f"{name} = 1e9")
        b.assigned_in_step.add(name)
        b.step("end", f"if {_taken(b)} < {name}:\n    {name} = loss.item()")
    else:
        b.setup.append(f"{name} = torch.tensor(1e9)")
        b.assigned_in_step.add(name)
        b.step("end", f"{name} = torch.minimum({name}, loss.detach())")
        b.returns.append((name, f"{name}.item()"))


def kept_and_branched_later(b: Builder) -> None:
    """A number that the last call kept decides in this one: a plain number by then."""
    name = b.name("last")
    b.setup.append(f"{name} = 0.0")
    b.assigned_in_step.add(name)
    form = b.rng.choice(
        (
            "loss = loss * (2.0 if {n} > 0.5 else 0.5)",
            "if {n} != 0:\n    loss = loss / (1 + {n} * {n})",
            "loss = loss * min({n}, 1.5)",
            "loss = loss + h[:, : 1 + int(abs({n})) % 3].mean()",
            "loss = loss + int({n})",
        )
    )
    b.step("loss", form.format(n=name))
    b.step("end", f"{name} = {_taken(b)}")


def log_of_values(b: Builder) -> None:
    """Appended to a list, written to a dict: refused side effects, or a dict that is bound anew."""
    name = b.name("log")
    new = b.chance(0.5)
    b.setup.append(f"{name} = {{}}" if new or b.chance(0.5) else f"{name} = []")
    if new:
        b.assigned_in_step.add(name)
        b.step("end", f"{name} = {{'loss': {_taken(b)}, 'step': 1}}")
    elif b.setup[-1].endswith("{}"):
        b.step("end", f"{name}['loss'] = {_taken(b)}")
    else:
        b.step("end", f"{name}.append({_taken(b)})")


def gradient_norm(b: Builder) -> None:
    b.step("gradients", "total_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)")
    b.returns.append(("total_norm", b.rng.choice(("total_norm.item()", "float(total_norm)", "total_norm"))))


def every_second_call(b: Builder) -> None:
    """A value that is taken at some calls only."""
    name = b.name("calls")
    b.setup.append(f"{name} = 0")
    b.assigned_in_step.add(name)
    b.step("end", f"{name} += 1", f"logged = {_taken(b)} if {name} % 2 == 0 else None")
    b.returns.append(("logged", "logged"))


TAKEN_VALUES: dict[str, Callable[[Builder], None]] = {
    f"taken:{name}": each
    for name, each in list(globals().items())
    if not name.startswith("_") and getattr(each, "__module__", "") == __name__
}
"""All public functions of this file, in its order."""
