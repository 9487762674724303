"""A seed becomes a program: which parts it has, and how they are put together."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from fuzz.between import BETWEEN
from fuzz.features import FEATURES
from fuzz.number_homes import COMMON, HOMES, change
from fuzz.number_uses import FLOAT_TERMS, WHOLE_STATEMENTS, WHOLE_TERMS, WRITES
from fuzz.optimizers import OPTIMIZER_NAMES, WRAPPER_NAMES, make_optimizer
from fuzz.program import FORMS, Builder, render
from fuzz.switched_off import SWITCHED_OFF
from fuzz.taken_values import TAKEN_VALUES
from fuzz.trainers import TRAINERS

ALL = {
    *(f"form:{name}" for name in FORMS),
    *HOMES,
    *(f"whole:{name}" for name in WHOLE_TERMS),
    *(f"float:{name}" for name in FLOAT_TERMS),
    *(f"write:{name}" for name in WRITES),
    *(f"flow:{name}" for name in WHOLE_STATEMENTS),
    *FEATURES,
    *BETWEEN,
    *TAKEN_VALUES,
    *TRAINERS,
    *OPTIMIZER_NAMES,
    *WRAPPER_NAMES,
    *(f"training:{name}" for name in ("scaler", "accumulate", "context", "scheduler", "closure", "two optimizers")),
}
"""The name of every part of the grammar."""


def write_program(seed: int, without: Mapping[str, str] | None = None) -> tuple[str, list[str]]:
    """The source of the program of a seed, and the names of its parts."""
    off = SWITCHED_OFF if without is None else without
    b = Builder(random.Random(f"wholestep fuzz {seed}"))

    def wanted(name: str) -> bool:
        return name not in off

    b.form = b.rng.choice([form for form in FORMS if wanted(f"form:{form}")])
    b.features.append(f"form:{b.form}")
    _network(b)
    two = wanted("training:two optimizers") and b.chance(0.15)
    b.setup.append("model = Net()")
    make_optimizer(b, "optimizer", "model.first" if two else "model", wanted)
    if two:
        b.features.append("training:two optimizers")
        make_optimizer(b, "second", "model.last", wanted)
    b.step("forward", "h = model(x)")
    b.step(
        "loss",
        b.rng.choice(("loss = h.square().mean()", "loss = F.cross_entropy(h, x.argmax(1))", "loss = h.abs().sum()")),
    )
    b.returns.append(("loss", b.rng.choice(("loss", "loss", "loss.detach()"))))
    for _ in range(b.rng.choice((0, 1, 1, 2, 2, 3))):
        _number(b, wanted)
    _pick(b, FEATURES, b.rng.choice((0, 0, 1, 1, 2, 3)), wanted)
    _pick(b, TAKEN_VALUES, b.rng.choice((0, 0, 0, 0, 1, 2)), wanted)
    _pick(b, TRAINERS, b.rng.choice((0, 0, 1, 1, 2)), wanted)
    _pick(b, BETWEEN, b.rng.choice((0, 0, 0, 1, 1, 2)), wanted)
    _training(b, wanted)
    return render(b, f"Seed {seed}."), b.features


def _network(b: Builder) -> None:
    b.net_init += ["self.first = nn.Linear(3, 4)", "self.last = nn.Linear(4, 4)"]
    b.net_forward.append(
        b.rng.choice(("h = torch.tanh(self.first(h))", "h = F.gelu(self.first(h))", "h = self.first(h).relu()"))
    )
    b.net_forward.append("h = self.last(h)")


def _pick(
    b: Builder, table: Mapping[str, Callable[[Builder], None]], count: int, wanted: Callable[[str], bool]
) -> None:
    names = [name for name in table if wanted(name)]
    for name in b.rng.sample(names, min(count, len(names))):
        b.features.append(name)
        table[name](b)


def _number(b: Builder, wanted: Callable[[str], bool]) -> None:
    homes = [name for name in HOMES if wanted(name)]
    common = [name for name in homes if name.split(":")[1] in COMMON]
    name = b.rng.choice(common if b.chance(0.5) else homes)
    whole = b.chance(0.6)
    home = HOMES[name](b, b.rng.choice(("0", "1", "2") if whole else ("0.5", "1.0", "0.25")))
    b.features.append(name)
    for _ in range(b.rng.choice((1, 1, 2))):
        _use(b, home.read, whole, wanted)
    b.features.append(f"change:{change(b, home, whole=whole)}")
    if b.chance(0.15):
        b.returns.append(
            (b.name("number"), b.rng.choice(("{k}", "{k} * 2", "{k} + 1", 'f"{{{k}}}"')).format(k=home.read))
        )
        b.features.append("returned number")


def _use(b: Builder, read: str, whole: bool, wanted: Callable[[str], bool]) -> None:
    if not whole:
        key = b.rng.choice([key for key in FLOAT_TERMS if wanted(f"float:{key}")])
        b.features.append(f"float:{key}")
        b.step("loss", f"loss = loss + {FLOAT_TERMS[key].format(k=read)}")
        return
    kind = b.rng.choice(("term", "term", "term", "write", "flow"))
    if kind == "write":
        key = b.rng.choice([key for key in WRITES if wanted(f"write:{key}")])
        b.features.append(f"write:{key}")
        if not any("'bank'" in line for line in b.net_init):
            b.net_init.append("self.register_buffer('bank', torch.zeros(6, 4))")
            b.step("loss", "loss = loss + (h @ model.bank.T.clone()).square().mean()")
        b.step("end", "bank = model.bank", WRITES[key].format(k=read))
        return
    table, title = (WHOLE_TERMS, "whole") if kind == "term" else (WHOLE_STATEMENTS, "flow")
    key = b.rng.choice([key for key in table if wanted(f"{title}:{key}")])
    b.features.append(f"{title}:{key}")
    text = table[key].format(k=read)
    b.step("loss", f"loss = loss + {text}" if kind == "term" else text)


_ACCUMULATION = """
class Accumulation:
    def __init__(self, every):
        self.every, self.micro, self.sync_gradients = every, 0, True

    @contextlib.contextmanager
    def accumulate(self, *models):
        self.micro += 1
        self.sync_gradients = self.micro % self.every == 0
        with contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(contextlib.nullcontext(model))
            yield
"""


def _training(b: Builder, wanted: Callable[[str], bool]) -> None:
    """Backward, the optimizers, their schedulers, and zero_grad."""
    first = b.optimizers[0]
    can = [name for name in ("scaler", "accumulate", "context", "scheduler", "closure") if wanted(f"training:{name}")]
    wrapped = any(name.startswith("wrapper:") or name == "optimizer:not an optimizer" for name in b.features)
    chosen = b.rng.choice(can) if can and b.chance(0.3) else "plain"
    if chosen in ("scaler", "scheduler", "closure") and (wrapped or any("own" in name for name in b.features)):
        chosen = "plain"
    if chosen != "plain":
        b.features.append(f"training:{chosen}")
    steps = [f"{name}.step()" for name in b.optimizers]
    zero = [f"{name}.zero_grad({b.rng.choice(('', '', 'set_to_none=False'))})" for name in b.optimizers]
    if chosen == "scaler":
        b.setup.append("scaler = torch.amp.GradScaler('cpu', init_scale=8.0, growth_interval=3)")
        b.step("backward", "scaler.scale(loss).backward()")
        if b.chance(0.5):
            b.sections["gradients"].insert(0, f"scaler.unscale_({first})")
        steps = [f"scaler.step({name})" for name in b.optimizers] + ["scaler.update()"]
    else:
        b.step("backward", "loss.backward()")
    if chosen == "accumulate":
        b.setup.append("micro = 0")
        b.assigned_in_step.add("micro")
        b.step("start", "micro += 1")
        b.step("update", "if micro % 2 == 0:", *(f"    {line}" for line in (*steps, *zero)))
        return
    if chosen == "context":
        b.add_top(_ACCUMULATION)
        b.setup.append("accumulation = Accumulation(2)")
        b.sections["backward"].insert(0, "with accumulation.accumulate(model):")
        b.sections["backward"][1:] = [f"    {line}" for line in b.sections["backward"][1:]]
        b.step("update", "if accumulation.sync_gradients:", *(f"    {line}" for line in (*steps, *zero)))
        return
    if chosen == "closure":
        b.step("update", "def closure():\n    return loss", f"{first}.step(closure)", *steps[1:], *zero)
        return
    if b.chance(0.7):
        b.step("update", *steps, *zero)
    elif b.chance(0.7):
        b.step("start", *zero)
        b.step("update", *steps)
    else:
        b.step("update", *steps)
    if chosen == "scheduler":
        made = b.rng.choice(
            (
                "StepLR({}, 2, gamma=0.5)",
                "CosineAnnealingLR({}, 5)",
                "LambdaLR({}, lambda n: 1 / (n + 1))",
                "OneCycleLR({}, max_lr=0.1, total_steps=10, cycle_momentum=False)",
                "LinearLR({}, total_iters=4)",
                "CyclicLR({}, 0.01, 0.1, step_size_up=2, cycle_momentum=False)",
            )
        )
        if made.startswith(("OneCycleLR", "CyclicLR", "LambdaLR")) and "trainer:added_group" in b.features:
            made = "StepLR({}, 2, gamma=0.5)"  # they count the groups that there were when they were made
        b.setup.append(f"scheduler = torch.optim.lr_scheduler.{made.format(first)}")
        if b.chance(0.5):
            b.step("update", "scheduler.step()")
        else:
            b.after("scheduler.step()")
