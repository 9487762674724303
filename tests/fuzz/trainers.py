"""What training loops put around a step: accumulation, state and callbacks of a trainer, schedulers, checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.program import Builder


def shared_gradient_state(b: Builder) -> None:
    """A flag in a dict that all instances share, as Accelerate's GradientState has it."""
    b.add_top(
        """
class GradientState:
    _shared = {}

    def __init__(self):
        self.__dict__ = self._shared
        if not self._shared:
            self.sync, self.micro, self.every = True, 0, 2

    @contextlib.contextmanager
    def accumulate(self):
        self.micro += 1
        self.sync = self.micro % self.every == 0
        yield self
        self.last = self.sync
"""
    )
    b.setup.append("gradients = GradientState()")
    inside = b.rng.choice(("loss = loss / state.every", "loss = loss * (2.0 if state.sync else 0.5)"))
    b.step("loss", f"with gradients.accumulate() as state:\n    {inside}")
    if b.chance(0.5):
        b.step("gradients", "if GradientState().sync:\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)")
    if b.chance(0.3):
        b.after("if i == 3:\n    gradients.every = 3")


def micro_batches(b: Builder) -> None:
    """Several backwards in one call."""
    count = b.rng.choice((2, 3))
    split = b.rng.choice((f"x.chunk({count})", "x.split(2)", f"[x * (n + 1) for n in range({count})]"))
    b.step("backward", f"for part in {split}:", f"    (model(part).square().mean() / {count}).backward()")


def own_scheduler(b: Builder) -> None:
    """A scheduler of the user's own that the step calls."""
    formula = b.rng.choice(
        (
            "self.base * min(1.0, self.count / 4)",
            "self.base * 0.5 * (1 + math.cos(math.pi * min(1.0, self.count / 6)))",
            "self.base / math.sqrt(self.count + 1)",
            "self.base * 0.5 ** (self.count // 2)",
            "self.base if self.count < 3 else self.base * 0.1",
            "self.base * (1 - self.count / 10) ** 0.9",
        )
    )
    b.add_top(
        f"""
class Warmup:
    def __init__(self, optimizer):
        self.optimizer, self.base, self.count = optimizer, 0.05, 0

    def step(self):
        self.count += 1
        for group in self.optimizer.param_groups:
            group['lr'] = self.rate()

    def rate(self):
        return {formula}
"""
    )
    b.setup.append("warmup = Warmup(optimizer)")
    b.step(b.rng.choice(("start", "update", "end")), "warmup.step()")
    if b.chance(0.4):
        b.returns.append(("rate", b.rng.choice(("warmup.rate()", "optimizer.param_groups[0]['lr']", "warmup.count"))))


def torch_scheduler(b: Builder) -> None:
    """Schedulers of torch in the step, over an optimizer that may be wrapped: its innermost one is asked for."""
    if any(name.startswith("wrapper:") for name in b.features) or any("own" in name for name in b.features):
        own_scheduler(b)
        return
    made = b.rng.choice(
        (
            "SequentialLR({o}, [S.ConstantLR({o}, 0.5, 2), S.ExponentialLR({o}, 0.9)], milestones=[2])",
            "ChainedScheduler([S.LinearLR({o}, total_iters=3), S.ExponentialLR({o}, 0.9)])",
            "MultiStepLR({o}, [2, 4], gamma=0.3)",
            "ExponentialLR({o}, 0.8)",
            "PolynomialLR({o}, 5, power=2.0)",
            "CosineAnnealingWarmRestarts({o}, 3)",
            "MultiplicativeLR({o}, lambda n: 0.9)",
            "LambdaLR({o}, [lambda n: 0.9 ** n] * len({o}.param_groups))",
            "ConstantLR({o}, 0.5, 3)",
        )
    )
    if any("not an optimizer" in name or name == "optimizer:adam tensor lr" for name in b.features):
        return
    b.setup += ["S = torch.optim.lr_scheduler", f"schedule = S.{made.format(o='optimizer')}"]
    b.step("end", "schedule.step()")
    if b.chance(0.5):
        b.returns.append(
            ("lr", b.rng.choice(("schedule.get_last_lr()[0]", "schedule.last_epoch", "schedule.get_last_lr()")))
        )


def trainer_state(b: Builder) -> None:
    """Counts of calls and epochs, which decide what a call does."""
    name = b.name("state")
    b.setup.append(f"{name} = types.SimpleNamespace(step=0, epoch=0, log=None)")
    b.step("start", f"{name}.step += 1", f"{name}.epoch = {name}.step // 3")
    if b.chance(0.5):
        b.step("loss", f"loss = loss * (1 + 0.1 * {name}.epoch)")
    if b.chance(0.5):
        b.step("end", f"if {name}.step % 2 == 0:\n    {name}.log = (loss.detach(), {name}.step)")
    b.returns.append(("step", f"{name}.step"))


def callbacks(b: Builder) -> None:
    b.add_top(
        """
class Callback:
    def __init__(self, scale):
        self.scale, self.calls = scale, 0

    def before(self, h):
        self.calls += 1
        return h * self.scale

    def after(self, loss):
        return loss + 0.01 * self.calls


class Counting(Callback):
    def before(self, h):
        super().before(h)
        return h + self.calls
"""
    )
    made = b.rng.choice(("[Callback(0.5)]", "[Callback(0.5), Counting(2.0)]", "(Counting(1.0), Counting(1.0))"))
    b.setup.append(f"watchers = {made}")
    b.step("forward", "for each in watchers:\n    h = each.before(h)")
    b.step("loss", "for each in watchers:\n    loss = each.after(loss)")
    if b.chance(0.4):
        b.after("watchers[0].scale = 0.5 + 0.25 * (i % 3)")


def early_return(b: Builder) -> None:
    """A call that returns before it trains."""
    name = b.name("calls")
    b.setup.append(f"{name} = 0")
    b.assigned_in_step.add(name)
    when = b.rng.choice(("{n} == 2", "{n} % 3 == 0", "{n} > 4", "not model.training"))
    value = b.rng.choice(("None", "h.mean()", "{{'skipped': {n}}}", "loss.detach()"))
    b.step("loss", f"{name} += 1", f"if {when.format(n=name)}:\n    return {value.format(n=name)}")


def momentum_teacher(b: Builder) -> None:
    """A teacher whose momentum follows a schedule (BYOL, DINO)."""
    b.setup += ["teacher = copy.deepcopy(model).requires_grad_(False)", "ticks = 0"]
    b.assigned_in_step.add("ticks")
    b.step("forward", "with torch.no_grad():\n    aim = teacher(x)")
    b.step("loss", "loss = loss + F.mse_loss(h, aim)")
    momentum = b.rng.choice(
        ("1 - 0.1 * (math.cos(math.pi * ticks / 6) + 1) / 2", "min(1 - 1 / (ticks + 1), 0.95)", "0.9 + 0.01 * ticks")
    )
    write = b.rng.choice(
        ("t.mul_(m).add_((1 - m) * p.detach())", "t.lerp_(p, 1 - m)", "t.data = t.data * m + p.data * (1 - m)")
    )
    b.step(
        "end",
        f"ticks += 1\nm = {momentum}",
        "with torch.no_grad():",
        "    for t, p in zip(teacher.parameters(), model.parameters()):",
        f"        {write}",
    )


def alternating(b: Builder) -> None:
    """Layers that are trained by turns."""
    name = b.name("turn")
    b.setup.append(f"{name} = 0")
    b.assigned_in_step.add(name)
    b.step("gradients", f"if {name} % 2:\n    model.last.zero_grad()\nelse:\n    model.first.weight.grad = None")
    b.step("end", f"{name} += 1")


def step_hooks(b: Builder) -> None:
    """Hooks of the optimizer."""
    if any(name.startswith("wrapper:") or "not an optimizer" in name for name in b.features):
        return
    b.setup.append("hooked = types.SimpleNamespace(calls=0)")
    way = b.rng.choice(("pre", "post"))
    b.add_top(
        "def count_step(*given):\n    hooked.calls += 1" if b.form != "closure" else "def count_step(*given):\n    pass"
    )
    b.setup.append(f"optimizer.register_step_{way}_hook(count_step)")


def gradients_by_hand(b: Builder) -> None:
    b.step(
        "gradients",
        "wanted = [p for p in model.parameters() if p.requires_grad and p.grad is not None]",
        "for p, g in zip(wanted, torch.autograd.grad(model(x).square().mean(), wanted)):",
        f"    p.grad {b.rng.choice(('= g', '+= g', '= p.grad + 0.5 * g'))}",
    )


def backward_of_inputs(b: Builder) -> None:
    b.step("backward", "model(x * 2).mean().backward(inputs=[model.first.weight])")


def mixup(b: Builder) -> None:
    name = b.name("lam")
    b.parameters.append((name, b.rng.choice(("0.5 + 0.1 * (i % 3)", "1.0", "0.25"))))
    b.step("start", f"x = {name} * x + (1 - {name}) * x.roll(1, 0)")


def curriculum(b: Builder) -> None:
    """How much of the batch is used grows."""
    name = b.name("length")
    b.setup.append(f"{name} = 1")
    b.assigned_between.add(name)
    b.step("loss", f"loss = loss + model(x[:{name}]).square().mean() / {name}")
    b.after(f"{name} = min({name} + 1, 3)")


def annealed_dropout(b: Builder) -> None:
    b.net_init.append("self.drop = nn.Dropout(0.1)")
    b.net_forward.append("h = self.drop(h)")
    b.after("model.drop.p = (0.1, 0.3, 0.0, 0.5)[i % 4]")


def learned_scale(b: Builder) -> None:
    """A parameter that is clamped after each update (CLIP)."""
    b.net_init.append("self.logit_scale = nn.Parameter(torch.ones(()) * 2)")
    b.net_forward.append("h = h * self.logit_scale.exp()")
    clamp = b.rng.choice(("model.logit_scale.clamp_(0, 2.1)", "model.logit_scale.data.clamp_(max=2.0)"))
    b.step("end", f"with torch.no_grad():\n    {clamp}")


def uncertainty_weights(b: Builder) -> None:
    b.net_init.append("self.log_vars = nn.Parameter(torch.zeros(2))")
    b.step("loss", "loss = sum(l * torch.exp(-v) + v for l, v in zip((loss, h.abs().mean()), model.log_vars))")


def saved_to_bytes(b: Builder) -> None:
    """A checkpoint that is written to bytes and loaded again."""
    b.setup.append("stored = None")
    b.assigned_between.add("stored")
    b.after(
        "if i == 1:",
        "    stored = io.BytesIO()",
        "    torch.save({'model': model.state_dict(), 'rng': torch.get_rng_state(), 'i': i}, stored)",
        "if i == 3:",
        "    stored.seek(0)",
        "    loaded = torch.load(stored)",
        f"    model.load_state_dict(loaded['model']{b.rng.choice(('', ', strict=False', ', assign=True'))})",
        "    torch.set_rng_state(loaded['rng'])",
        "    stored = None",
    )


def whole_checkpoint(b: Builder) -> None:
    """Model and optimizer go back together."""
    b.setup.append("stored_all = None")
    b.assigned_between.add("stored_all")
    b.after(
        f"if i == {b.rng.choice((0, 1))}:",
        "    both = [each for each in (model, optimizer) if hasattr(each, 'state_dict')]",
        "    stored_all = copy.deepcopy([each.state_dict() for each in both])",
        f"if i == {b.rng.choice((2, 3, 4))}:",
        "    for each, values in zip((model, optimizer), stored_all):",
        "        try:",
        "            each.load_state_dict(copy.deepcopy(values))",
        "        except (KeyError, ValueError):  # of an optimizer whose groups changed",
        "            pass",
    )


def weights_swapped(b: Builder) -> None:
    """Averaged weights for an evaluation, and back."""
    b.setup.append("kept = [p.detach().clone() for p in model.parameters()]")
    b.add_top(
        """
def swap_copies(p, k):
    old = p.detach().clone()
    p.data.copy_(k)
    k.copy_(old)


def shrink_all(parameters):
    parameters = list(parameters)
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(0.9 * vector, parameters)
"""
    )
    swap = b.rng.choice(
        (
            "for p, k in zip(model.parameters(), kept):\n    p.data, k.data = k.data, p.data",
            "for p, k in zip(model.parameters(), kept):\n    swap_copies(p, k)",
            "shrink_all(model.parameters())",
        )
    )
    b.after("if i % 2:\n    " + swap.replace("\n", "\n    "))


def evaluated_between(b: Builder) -> None:
    b.after("model.eval()", "with torch.no_grad():\n    model(batch(i, 2, 3))", "model.train()")


def context_of_mode(b: Builder) -> None:
    """A context manager of the user's own around the forward."""
    b.add_top(
        """
@contextlib.contextmanager
def training(model, on):
    before = model.training
    model.train(on)
    try:
        yield
    finally:
        model.train(before)
"""
    )
    b.step("forward", f"with training(model, {b.rng.choice(('True', 'False'))}):\n    h = h + model(x * 0.5)")


def added_group(b: Builder) -> None:
    """A param group that is added between two calls."""
    if any(name.startswith("wrapper:") or "not an optimizer" in name for name in b.features):
        return
    b.setup.append("later = nn.Parameter(torch.ones(4))")
    b.step("forward", "h = h * later")
    b.after(f"if i == 2:\n    optimizer.add_param_group(dict(params=[later], lr={b.rng.choice(('0.1', '0.5'))}))")


def second_call_of_step(b: Builder) -> None:
    """The optimizer steps twice in a call."""
    b.step("update", "optimizer.step()")


TRAINERS: dict[str, Callable[[Builder], None]] = {
    f"trainer:{each.__name__}": each for each in list(globals().values()) if getattr(each, "__module__", "") == __name__
}
"""All functions of this file, in its order."""
