"""What else a training step has: buffers, queues, averages, caches, autograd functions, values read elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.program import Builder

Feature = Callable[[Builder], None]


def running_mean(b: Builder) -> None:
    """A buffer written in place in the forward."""
    b.net_init.append("self.register_buffer('mean', torch.zeros(4))")
    b.net_forward.append("self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)")
    b.net_forward.append("h = h - self.mean")


def rebound_buffer(b: Builder) -> None:
    b.net_init.append("self.register_buffer('center', torch.zeros(4))")
    b.step("end", "model.center = 0.9 * model.center + 0.1 * h.detach().mean(0)")
    b.step("loss", "loss = loss + (h - model.center).square().mean()")


def none_at_first(b: Builder) -> None:
    if any("AveragedModel" in line for line in b.setup):
        return  # it averages the buffers that there were when it was made, and torch refuses another number of them
    b.net_init.append("self.register_buffer('previous', None)")
    b.step("loss", "if model.previous is not None:\n    loss = loss + (h.mean(0) - model.previous).square().mean()")
    b.step("end", "model.previous = h.detach().mean(0)")


def none_attribute_at_first(b: Builder) -> None:
    b.net_init.append("self.latest = None")
    b.net_forward.append(
        "self.latest = h.detach().mean() if self.latest is None else self.latest * 0.5 + h.detach().mean()"
    )
    b.step("loss", "loss = loss + 0.1 * model.latest")


def batch_norm(b: Builder) -> None:
    b.net_init.append(f"self.norm = nn.BatchNorm1d(4, momentum={b.rng.choice(('0.1', 'None'))})")
    b.net_forward.append("h = self.norm(h)")


def layer_norm(b: Builder) -> None:
    b.net_init.append("self.layer_norm = nn.LayerNorm(4)")
    b.net_forward.append("h = self.layer_norm(h)")


def dropout(b: Builder) -> None:
    b.net_init.append("self.dropout = nn.Dropout(0.25)")
    b.net_forward.append("h = self.dropout(h)")
    if b.chance(0.3):
        b.after(f"model.dropout.p = {b.rng.choice(('0.5 / (i + 1)', '0.1 * (i % 3)', 'max(0.0, 0.2 - 0.1 * i)'))}")


def generator(b: Builder) -> None:
    name = b.name("generator")
    b.setup.append(f"{name} = torch.Generator().manual_seed(7)")
    b.step("forward", f"h = h + 0.1 * torch.randn(4, generator={name})")


def moving_pointer(b: Builder) -> None:
    """A queue in buffers of the module, written at a pointer that moves."""
    pointer = b.rng.choice(("number", "number", "buffer"))
    size = b.rng.choice((1, 2, 3))
    b.net_init.append("self.register_buffer('queue', torch.zeros(6, 4))")
    form = b.rng.choice(
        ("self.queue[{a}:{a} + n] = rows", "self.queue.narrow(0, {a}, n).copy_(rows)", "self.queue[{a}] = rows[0]")
    )
    if pointer == "number":
        b.net_init.append("self.pointer = 0")
        lines = [f"n = {size}", form.format(a="self.pointer"), f"self.pointer = (self.pointer + {size}) % 6"]
    else:
        b.net_init.append("self.register_buffer('pointer', torch.zeros(1, dtype=torch.long))")
        lines = [f"n = {size}", "a = int(self.pointer)", form.format(a="a"), f"self.pointer[0] = (a + {size}) % 6"]
    b.add_top("def enqueue(self, rows):\n" + "\n".join(f"    {line}" for line in lines))
    b.step("end", f"with torch.no_grad():\n    enqueue(model, h[:{size}].detach())")
    b.step("loss", "loss = loss + (h[:2] @ model.queue.T).square().mean()")


def average_of_weights(b: Builder) -> None:
    name = b.name("average")
    b.setup.append(f"{name} = copy.deepcopy(model).requires_grad_(False)")
    way = b.rng.choice(("lerp", "mul", "decay"))
    if way == "decay":
        b.setup.append(f"{name}_count = 0")
        b.assigned_in_step.add(f"{name}_count")
        b.step("end", f"{name}_count += 1", f"decay = min(0.9, (1 + {name}_count) / (10 + {name}_count))")
        line = "a.mul_(decay).add_(p, alpha=1 - decay)"
    else:
        line = "a.lerp_(p, 0.1)" if way == "lerp" else "a.mul_(0.9).add_(p, alpha=0.1)"
    b.step(
        "end",
        "with torch.no_grad():",
        f"    for a, p in zip({name}.parameters(), model.parameters()):",
        f"        {line}",
    )


def swa(b: Builder) -> None:
    if any("'previous', None" in line for line in b.net_init):
        return  # as above
    name = b.name("average")
    b.setup.append(f"{name} = torch.optim.swa_utils.AveragedModel(model)")
    if b.chance(0.5):
        b.step("end", f"{name}.update_parameters(model)")
    else:
        b.after(f"{name}.update_parameters(model)")


def clip_norm(b: Builder) -> None:
    b.step("gradients", "norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)")
    b.returns.append(("norm", "norm"))


def clip_value(b: Builder) -> None:
    b.step("gradients", "nn.utils.clip_grad_value_(model.parameters(), 0.05)")


def gradient_noise(b: Builder) -> None:
    b.step(
        "gradients",
        "for p in model.parameters():",
        "    if p.grad is not None:",
        "        p.grad.add_(torch.randn_like(p), alpha=0.01)",
    )


def gradient_rebound(b: Builder) -> None:
    b.step(
        "gradients",
        "for p in model.parameters():",
        "    if p.grad is not None:",
        "        p.grad = p.grad * 0.5",
    )


def manual_decay(b: Builder) -> None:
    b.step("update", "with torch.no_grad():\n    for p in model.parameters():\n        p.mul_(0.99)")


def penalty(b: Builder) -> None:
    b.step("loss", "loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())")


def gradient_penalty(b: Builder) -> None:
    b.step(
        "loss",
        "(slope,) = torch.autograd.grad(h.sum(), model.first.weight, create_graph=True)",
        "loss = loss + 0.1 * slope.square().mean()",
    )


def rows_in_place(b: Builder) -> None:
    """In-place views of an activation."""
    line = b.rng.choice(("h[:, 0] *= 2", "h[:, 1:3].mul_(0.5)", "h.select(1, 2).add_(1)", "h.T[0].neg_()", "h += 1"))
    b.step("forward", "h = h.clone()", line)


def weights_in_place(b: Builder) -> None:
    line = b.rng.choice(
        (
            "model.first.weight[:1].mul_(0.9)",
            "model.first.weight.data.clamp_(-0.5, 0.5)",
            "model.first.weight.copy_(model.first.weight / model.first.weight.norm())",
            "model.first.weight.view(-1)[0] = 0.25",
        )
    )
    b.step("end", f"with torch.no_grad():\n    {line}")


def counting_function(b: Builder) -> None:
    """An autograd.Function with a counter on its class."""
    name = b.name("Scaled")
    used = "Counted.calls * 0.1" if b.chance(0.5) else "0.5"
    b.add_top(
        f"""
class {name}(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, value):
        {name}.calls += 1
        return value * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * {used.replace("Counted", name)}
"""
    )
    b.step("forward", f"h = {name}.apply(h)")


def plain_function(b: Builder) -> None:
    name = b.name("Clipped")
    b.add_top(
        f"""
class {name}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, limit):
        ctx.save_for_backward(value)
        ctx.limit = limit
        return value.clamp(-limit, limit)

    @staticmethod
    def backward(ctx, grad):
        (value,) = ctx.saved_tensors
        return grad * (value.abs() < ctx.limit), None
"""
    )
    b.step("forward", f"h = {name}.apply(h, 1.5)")


def checkpointed(b: Builder) -> None:
    b.net_init.append("self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())")
    b.net_forward.append(f"h = checkpoint(self.inner, h, use_reentrant={b.rng.choice(('False', 'False', 'True'))})")


def tied(b: Builder) -> None:
    b.net_init += ["self.a = nn.Linear(4, 4)", "self.b = nn.Linear(4, 4)", "self.b.weight = self.a.weight"]
    b.net_forward.append("h = self.b(torch.tanh(self.a(h)))")


def nested(b: Builder) -> None:
    b.net_init.append("self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])")
    b.net_forward.append("for block in self.blocks:\n    h = h + block(h)")


def depth_by_number(b: Builder) -> None:
    """How many blocks run is an attribute."""
    b.net_init += ["self.steps = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])", "self.depth = 1"]
    b.net_forward.append("for block in self.steps[:self.depth]:\n    h = torch.tanh(block(h))")
    b.after("model.depth = 1 + i % 3")


def cached_function(b: Builder) -> None:
    """A tensor in functools.lru_cache. Eager fills the cache in its first call; of calls that ran as a graph nothing
    stays in it, so what eager does after a refusal may be something else (under another default dtype)."""
    name = b.name("weights")
    b.add_top("NOT_REPEATABLE = True")
    b.add_top(f"@functools.lru_cache\ndef {name}(n):\n    return torch.linspace(0.5, 1.5, n)")
    b.step("forward", f"h = h * {name}(h.shape[1])")


def class_cache(b: Builder) -> None:
    name = b.name("Cache")
    b.add_top(
        f"""
class {name}:
    values = {{}}

    @classmethod
    def mask(cls, n):
        if n not in cls.values:
            cls.values[n] = torch.ones(n, n).tril()
        return cls.values[n]
"""
    )
    b.step("forward", f"h = h @ {name}.mask(4)")


def module_cache(b: Builder) -> None:
    """A tensor made at the first forward and kept in an attribute."""
    b.net_init.append("self.positions = None")
    b.net_forward += [
        "if self.positions is None or self.positions.shape[0] != h.shape[0]:",
        "    self.positions = torch.arange(h.shape[0], dtype=h.dtype)[:, None]",
        "h = h + 0.1 * self.positions",
    ]


def clock_logged(b: Builder) -> None:
    b.step("start", "started = time.perf_counter()")
    b.step("end", "seconds = time.perf_counter() - started")


def clock_used(b: Builder) -> None:
    """A clock that reaches a tensor: no two runs are the same, so only a refusal is right."""
    b.add_top("NOT_REPEATABLE = True")
    call = b.rng.choice(("time.time()", "time.perf_counter()", "time.monotonic_ns() * 1e-9", "(uuid.uuid4().int % 7)"))
    b.step("loss", f"loss = loss * (1 + ({call}) % 1e-3)")


def random_number(b: Builder) -> None:
    b.step(
        "loss", f"loss = loss * {b.rng.choice(('random.random()', 'np.random.rand()', 'random.choice((0.5, 2.0))'))}"
    )


def iterator(b: Builder) -> None:
    name = b.name("numbers")
    made = b.rng.choice(
        ("itertools.count(1)", "iter([1.0, 2.0, 3.0] * 9)", "(n * 0.5 for n in range(99))", "itertools.cycle((1, 2))")
    )
    b.setup.append(f"{name} = {made}")
    b.step("loss", f"loss = loss * next({name})")


def history(b: Builder) -> None:
    """Appending to a list that outlives the call."""
    name = b.name("history")
    b.setup.append(f"{name} = []")
    b.step("end", f"{name}.append({b.rng.choice(('1', 'loss.detach()', 'float(len(' + name + '))'))})")


def counts(b: Builder) -> None:
    name = b.name("counts")
    b.setup.append(f"{name} = {{'calls': 0}}")
    b.step("end", f"{name}['calls'] += 1")
    if b.chance(0.5):
        b.step("loss", f"loss = loss * (1 + 0.1 * {name}['calls'])")


def queue_of_tensors(b: Builder) -> None:
    name = b.name("recent")
    b.setup.append(f"{name} = collections.deque([torch.zeros(4)] * 2, maxlen=2)")
    b.step("loss", f"loss = loss + (h.mean(0) - {name}[0]).square().mean()")
    if b.chance(0.5):
        b.step("end", f"{name}.append(h.detach().mean(0))")
    else:
        b.after(f"{name}.append(torch.full((4,), float(i)))")


def recurrent_state(b: Builder) -> None:
    """State that each call replaces: in a tuple, list or dict; in an attribute, of an object or a module."""
    name = b.name("recurrent")
    first, second = b.rng.choice((("[0]", "[1]"), ("['h']", "['c']")))
    form = "{{'h': {0}, 'c': {1}}}" if first == "['h']" else b.rng.choice(("({0}, {1})", "[{0}, {1}]", "({0}, {1}, 3)"))
    start = form.format("torch.zeros(4)", "torch.ones(4)")
    place = f"{name}.state"
    if b.chance(0.3):
        place = f"model.{name}"
        b.net_init.append(f"self.{name} = {start}")
    else:
        b.setup.append(f"{name} = types.SimpleNamespace(state={b.rng.choice((start, 'None'))})")
        b.step("start", f"if {place} is None:\n    {place} = {start}")
    b.step("loss", f"loss = loss + (h.mean(0) * {place}{first} - {place}{second}).square().mean()")
    new = b.rng.choice((f"{place}{first} * 0.5", "h.detach().sum(0)", f"{place}{first}"))
    b.step("end", f"{place} = {form.format('h.detach().mean(0)', new)}")
    if b.chance(0.3):
        b.after(f"if i == 2:\n    {place} = {start}")


def schedule_table(b: Builder) -> None:
    """A table of numbers at an index that the step or the user moves."""
    name = b.name("schedule")
    values = b.rng.choice(("[0.9 ** j for j in range(9)]", "[3, 1, 2, 5, 4, 1, 0, 2, 1]", "[0.5, 1, 2.0, True] * 3"))
    table = b.rng.choice(("{}", "tuple({})", "np.array({})", "np.array({}, dtype=np.float32)")).format(values)
    b.setup.append(f"{name} = types.SimpleNamespace(values={table}, at=0)")
    index = b.rng.choice(
        (f"{name}.at", f"-1 - {name}.at", f"{name}.at // 2", f"min({name}.at, 3)", f"({name}.at + 1) % 4")
    )
    read = b.rng.choice(("{0}.values[{1}]", "float({0}.values[{1}])", "sum({0}.values[:{1}])")).format(name, index)
    use = b.rng.choice(
        ("loss * {0}", "loss * {0} + (1 - {0}) * h.mean()", "loss if {0} > 0.8 else loss / (1 + {0} ** 2)")
    )
    b.step("loss", f"loss = {use.format(read)}")
    if b.chance(0.4):
        b.step("end", f"{name}.at += 1")
    else:
        b.after(f"{name}.at = {b.rng.choice(('i + 1', '(3 * i) % 8', '7 - i'))}")
    if b.chance(0.2):
        b.after(f"if i == 3:\n    {name}.values = {table}")


def second_backward(b: Builder) -> None:
    b.step("backward", "(h * 0.5).sum().backward(retain_graph=True)")


def frozen_forward(b: Builder) -> None:
    b.step("forward", "with torch.no_grad():\n    target = model(x * 0.5)")
    b.step("loss", "loss = loss + F.mse_loss(h, target)")


def evaluation(b: Builder) -> None:
    b.step("end", "model.eval()\nwith torch.no_grad():\n    check = model(x).mean()\nmodel.train()")
    b.returns.append(("check", "check"))


def cast(b: Builder) -> None:
    b.step("forward", "h = h.double().cumsum(1).float()")


def item_of_loss(b: Builder) -> None:
    """A value of a tensor becomes a Python number, or decides (see `taken_values.py` for more)."""
    b.step("end", b.rng.choice(("total = loss.item()", "total = float(loss)", "if loss > 0:\n    loss = loss * 1")))


def in_try(b: Builder) -> None:
    b.step("loss", "try:\n    loss = loss / 2\nfinally:\n    loss = loss + 1")


def step_conditional(b: Builder) -> None:
    """The optimizer steps at every second call only."""
    name = b.name("calls")
    b.setup.append(f"{name} = 0")
    b.assigned_in_step.add(name)
    b.step("start", f"{name} += 1")
    b.step("update", f"if {name} % 2:\n    model.first.bias.grad = None")


def tensor_on_object(b: Builder) -> None:
    name = b.name("record")
    b.setup.append(f"{name} = types.SimpleNamespace(best=torch.tensor(1e9), count=0)")
    b.step("end", f"{name}.best = torch.minimum({name}.best, loss.detach())", f"{name}.count += 1")


def tensor_global(b: Builder) -> None:
    name = b.name("total")
    b.setup.append(f"{name} = torch.zeros(())")
    if b.chance(0.5):
        b.assigned_in_step.add(name)
        b.step("end", f"{name} = {name} + loss.detach()")
    else:
        b.step("end", f"{name} += loss.detach()" if b.form == "nothing" else f"{name}.add_(loss.detach())")


def fork_of_randomness(b: Builder) -> None:
    b.step("forward", "with torch.random.fork_rng():\n    torch.manual_seed(3)\n    h = h + 0.1 * torch.rand(4)")


def result_number(b: Builder) -> None:
    b.returns.append(
        ("text", b.rng.choice(("'done'", "3", "0.5", "None", "h.shape[0]", "len(list(model.parameters()))")))
    )


def result_state(b: Builder) -> None:
    b.returns.append(
        ("weight", b.rng.choice(("model.first.weight", "h", "h.detach()", "x", "model.first.bias.detach()")))
    )


def autocast(b: Builder) -> None:
    b.step(
        "forward",
        "with torch.autocast('cpu', dtype=torch.bfloat16):",
        "    h = h + model(x * 0.5).float()",
    )


def vmapped(b: Builder) -> None:
    b.step("loss", "loss = loss + torch.vmap(lambda row: row.square().sum())(h).mean()")


def functional_gradient(b: Builder) -> None:
    b.step("loss", "loss = loss + torch.func.grad(lambda v: (v ** 3).sum())(h.detach()).mean()")


def state_dict_in_step(b: Builder) -> None:
    b.step("loss", "loss = loss + 0.1 * sum(v.float().sum() for v in model.state_dict().values())")


def deep_copy_in_step(b: Builder) -> None:
    b.step("loss", "loss = loss + copy.deepcopy(model.first.weight.detach()).sum() * 0.1")


def tensor_hook(b: Builder) -> None:
    b.step("forward", "h = h * 1.0", "h.register_hook(lambda g: g * 0.5)")


def module_hook(b: Builder) -> None:
    b.setup.append("model.first.register_forward_hook(lambda module, args, out: out * 0.5)")


def default_dict(b: Builder) -> None:
    name = b.name("totals")
    b.setup.append(f"{name} = collections.defaultdict(float)")
    b.step("loss", f"loss = loss * (1 + {name}['a'])")
    b.after(f"{name}['a'] += 0.25")


def enumeration(b: Builder) -> None:
    name = b.name("Mode")
    b.add_top(f"import enum\n\n\nclass {name}(enum.Enum):\n    A = 1\n    B = 2")
    b.setup.append(f"current = {name}.A")
    b.assigned_between.add("current")
    b.step("loss", f"loss = loss * (2.0 if current is {name}.A else 0.5)")
    b.after(f"current = {name}.B if i % 2 else {name}.A")


def string_setting(b: Builder) -> None:
    name = b.name("mode")
    b.setup.append(f"{name} = 'sum'")
    b.assigned_between.add(name)
    b.step("loss", f"loss = loss + getattr(h, {name})()")
    b.after(f"{name} = ('sum', 'mean', 'max')[i % 3]")


def function_setting(b: Builder) -> None:
    name = b.name("activation")
    b.net_init.append(f"self.{name} = torch.tanh")
    b.net_forward.append(f"h = self.{name}(h)")
    b.after(f"model.{name} = (torch.tanh, torch.sigmoid, F.relu)[i % 3]")


def module_swapped(b: Builder) -> None:
    b.net_init += ["self.head = nn.Linear(4, 4)"]
    b.net_forward.append("h = self.head(h)")
    b.after("if i == 2:\n    model.head = nn.Linear(4, 4)")


def equal_object_swapped(b: Builder) -> None:
    """An attribute is replaced by another object that compares equal but acts differently."""
    b.add_top(
        """
class Scale:
    def __init__(self, by):
        self.by = by

    def __eq__(self, other):
        return isinstance(other, Scale)

    def __hash__(self):
        return 1

    def __call__(self, h):
        return h * self.by
"""
    )
    b.net_init.append("self.rescale = Scale(2.0)")
    b.net_forward.append("h = self.rescale(h)")
    b.after("model.rescale = Scale(1.0 + i)")


def inference_branch(b: Builder) -> None:
    b.net_forward.append("h = h * (0.5 if self.training else 2.0)")


def grad_mode_setting(b: Builder) -> None:
    name = b.name("train_scale")
    b.setup.append(f"{name} = True")
    b.assigned_between.add(name)
    b.step("forward", f"with torch.set_grad_enabled({name}):\n    extra = model(x + 1)")
    b.step("loss", "loss = loss + extra.mean()")
    b.after(f"{name} = not {name}")


def nan_loss(b: Builder) -> None:
    b.step(
        "loss",
        "loss = loss + (h.detach() * 0).sum().log()"
        if b.chance(0.3)
        else "loss = loss + h.abs().log().clamp(-3).mean()",
    )


def parameter_list(b: Builder) -> None:
    b.net_init.append("self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(3)])")
    b.net_init.append("self.which = 0")
    b.net_forward.append("h = h * self.scales[self.which]")
    b.step("end", "model.which = (model.which + 1) % 3")


def embedding(b: Builder) -> None:
    b.net_init.append("self.embed = nn.Embedding(5, 4)")
    name = b.name("token")
    b.parameters.append((name, "i % 5"))
    b.step("forward", f"h = h + model.embed(torch.tensor({name}))")


def convolution(b: Builder) -> None:
    b.net_init.append("self.conv = nn.Conv1d(1, 2, 3, padding=1)")
    b.net_forward.append("h = self.conv(h[:, None]).mean(1)")


def attention(b: Builder) -> None:
    b.net_forward.append("h = h + F.scaled_dot_product_attention(h[None], h[None], h[None])[0]")


def set_of_names(b: Builder) -> None:
    name = b.name("frozen")
    b.setup.append(f"{name} = {{'first.bias'}}")
    b.step(
        "gradients",
        "for n, p in model.named_parameters():",
        f"    if n in {name}:",
        "        p.grad = None",
    )
    b.after(f"if i == 2:\n    {name}.add('first.weight')")


FEATURES: dict[str, Feature] = {
    f"feature:{each.__name__}": each for each in list(globals().values()) if getattr(each, "__module__", "") == __name__
}
"""All functions of this file, in its order."""
