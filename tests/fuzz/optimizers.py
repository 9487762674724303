"""Optimizers of a program, and what users put around them."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.program import Builder

TORCH = {
    "sgd": "torch.optim.SGD({p}, lr=0.1)",
    "momentum": "torch.optim.SGD({p}, lr=0.1, momentum=0.9, weight_decay=0.01)",
    "nesterov": "torch.optim.SGD({p}, lr=0.1, momentum=0.9, nesterov=True)",
    "sgd maximize": "torch.optim.SGD({p}, lr=0.01, maximize=True)",
    "sgd for": "torch.optim.SGD({p}, lr=0.1, momentum=0.5, foreach=False)",
    "sgd foreach": "torch.optim.SGD({p}, lr=0.1, momentum=0.5, foreach=True)",
    "adam": "torch.optim.Adam({p}, lr=0.01)",
    "adam amsgrad": "torch.optim.Adam({p}, lr=0.01, amsgrad=True)",
    "adam for": "torch.optim.Adam({p}, lr=0.01, foreach=False)",
    "adamw": "torch.optim.AdamW({p}, lr=0.01, weight_decay=0.1)",
    "adamw foreach": "torch.optim.AdamW({p}, lr=0.01, foreach=True)",
    "adamw fused": "torch.optim.AdamW({p}, lr=0.01, fused=True)",
    "adam tensor lr": "torch.optim.Adam({p}, lr=torch.tensor(0.01), foreach=False)",
    "rmsprop": "torch.optim.RMSprop({p}, lr=0.01, momentum=0.5)",
    "adagrad": "torch.optim.Adagrad({p}, lr=0.05, lr_decay=0.1)",
    "nadam": "torch.optim.NAdam({p}, lr=0.01)",
    "radam": "torch.optim.RAdam({p}, lr=0.01)",
    "adamax": "torch.optim.Adamax({p}, lr=0.01)",
    "asgd": "torch.optim.ASGD({p}, lr=0.01)",
    "rprop": "torch.optim.Rprop({p}, lr=0.01)",
    "adadelta": "torch.optim.Adadelta({p}, lr=0.5)",
    "adafactor": "torch.optim.Adafactor({p}, lr=0.01)",
}
_COMMON = ("sgd", "momentum", "adam", "adamw")

_OWN = {
    "own plain": """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group['lr'])
""",
    "own counting": """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr, beta=0.9))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state['step'] = 0
                    state['mean'] = torch.zeros_like(p)
                state['step'] += 1
                state['mean'].mul_(group['beta']).add_(p.grad, alpha=1 - group['beta'])
                correction = 1 - group['beta'] ** state['step']
                p.sub_(state['mean'] / correction * group['lr'])
""",
    "own group counter": """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr, k=0, warmup=3))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            k = group['k']
            lr = group['lr'] * min(1.0, (k + 1) / group['warmup'])
            weight = lr ** 2 / (k + 1)
            for p in group['params']:
                if p.grad is not None:
                    p.data.add_(p.grad.data, alpha=-lr - weight)
            group['k'] = k + 1
""",
    "own periodic": """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr, every=2))
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group['params']:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if 'slow' not in state:
                        state['slow'] = p.detach().clone()
                    p -= group['lr'] * p.grad
                    if self.calls % group['every'] == 0:
                        state['slow'].lerp_(p, 0.5)
                        p.copy_(state['slow'])
""",
    "own deepcopy": """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state['buffer'] = copy.deepcopy(p.data)
                state['buffer'].mul_(0.9).add_(p.grad.data)
                p.data.add_(state['buffer'], alpha=-group['lr'])
""",
    "own rebinding": """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is None:
                    continue
                state = self.state[p]
                state['mean'] = 0.9 * state.get('mean', 0.0) + p.grad
                state['count'] = state.get('count', 0) + 1
                p.sub_(state['mean'], alpha=group['lr'] / state['count'])
""",
    "own scheduled": """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))
        self.momentum = 0.5
        self.history = None

    @torch.no_grad()
    def step(self, closure=None):
        self.momentum = min(0.9, self.momentum + 0.1)
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g['params'] if p.grad is not None]).sum()
        self.history = norm if self.history is None else self.history * self.momentum + norm
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is not None:
                    p.sub_(p.grad / (1 + self.history), alpha=group['lr'])
""",
    "not an optimizer": """
class Own:
    def __init__(self, params, lr=0.1):
        self.param_groups = [dict(params=list(params), lr=lr)]
        self.count = 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group['lr'] / self.count)

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for p in group['params']:
                p.grad = None
""",
}

_WRAPPERS = {
    "private attribute": """
class Wrapper:
    def __init__(self, optimizer):
        self._optimizer = optimizer

    def step(self):
        self._optimizer.step()

    def zero_grad(self, set_to_none=True):
        self._optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self):
        return self._optimizer.param_groups
""",
    "name mangled": """
class Wrapper:
    def __init__(self, optimizer):
        self.__optimizer = optimizer
        self.steps = 0

    def step(self):
        self.steps += 1
        return self.__optimizer.step()

    def zero_grad(self, *args, **kwargs):
        self.__optimizer.zero_grad(*args, **kwargs)

    @property
    def param_groups(self):
        return self.__optimizer.param_groups
""",
    "slots": """
class Wrapper:
    __slots__ = ('inner', 'calls', 'k1', 'k2', 'k3', 'k4', 'k5', 'k6', 'k7', 'k8', 'k9')

    def __init__(self, optimizer):
        self.inner = optimizer
        self.calls = 0

    def step(self):
        self.inner.step()
        self.calls += 1

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    @property
    def param_groups(self):
        return self.inner.param_groups
""",
    "getattr": """
class Wrapper:
    def __init__(self, optimizer):
        self.__dict__['_inner'] = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__['_inner'], name)

    def step(self):
        return self._inner.step()
""",
    "lookahead": """
class Wrapper:
    def __init__(self, optimizer, k=2, alpha=0.5):
        self._base = optimizer
        self.k, self.alpha, self._count = k, alpha, 0
        self._slow = [[p.detach().clone() for p in g['params']] for g in optimizer.param_groups]

    @property
    def param_groups(self):
        return self._base.param_groups

    def step(self):
        self._base.step()
        self._count += 1
        if self._count % self.k == 0:
            with torch.no_grad():
                for group, slow in zip(self._base.param_groups, self._slow):
                    for p, s in zip(group['params'], slow):
                        s.add_(p - s, alpha=self.alpha)
                        p.copy_(s)

    def zero_grad(self, set_to_none=True):
        self._base.zero_grad(set_to_none)
""",
    "accumulating": """
class Wrapper:
    def __init__(self, optimizer, every=2):
        self._optimizer, self.every, self.micro = optimizer, every, 0

    @property
    def param_groups(self):
        return self._optimizer.param_groups

    def step(self):
        self.micro += 1
        if self.micro % self.every == 0:
            self._optimizer.step()

    def zero_grad(self, set_to_none=True):
        if self.micro % self.every == 0:
            self._optimizer.zero_grad(set_to_none)
""",
    "optimizer subclass": """
class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.base = optimizer
        self.param_groups = optimizer.param_groups
        self.defaults = getattr(optimizer, 'defaults', {})
        self.state = collections.defaultdict(dict)

    def step(self, closure=None):
        loss = self.base.step(closure)
        for group in self.param_groups:
            group['steps'] = group.get('steps', 0) + 1
        return loss

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)
        self.param_groups = self.base.param_groups
""",
    "chain of two": """
class Inner:
    def __init__(self, optimizer):
        self._wrapped = optimizer

    def step(self):
        self._wrapped.step()

    def zero_grad(self, set_to_none=True):
        self._wrapped.zero_grad(set_to_none)


class Wrapper:
    def __init__(self, optimizer):
        self._inner = Inner(optimizer)

    @property
    def param_groups(self):
        return self._inner._wrapped.param_groups

    def step(self):
        self._inner.step()

    def zero_grad(self, set_to_none=True):
        self._inner.zero_grad(set_to_none)
""",
    "bound methods": """
class Wrapper:
    def __init__(self, optimizer):
        self.step = optimizer.step
        self.zero_grad = optimizer.zero_grad
        self.param_groups = optimizer.param_groups
""",
    "closure": """
class Wrapper:
    def __init__(self, optimizer):
        self._step = lambda: optimizer.step()
        self._zero = lambda: optimizer.zero_grad()
        self.param_groups = optimizer.param_groups

    def step(self):
        self._step()

    def zero_grad(self, set_to_none=True):
        self._zero()
""",
    "warmup": """
class Wrapper:
    def __init__(self, optimizer, warmup=4):
        self._optimizer, self.warmup, self.count = optimizer, warmup, 0

    @property
    def param_groups(self):
        return self._optimizer.param_groups

    def step(self):
        self.count += 1
        for group in self._optimizer.param_groups:
            group['lr'] = 0.01 * min(1.0, self.count / self.warmup)
        self._optimizer.step()

    def zero_grad(self, set_to_none=True):
        self._optimizer.zero_grad(set_to_none)
""",
    "in a dict": """
class Wrapper:
    def __init__(self, optimizer):
        self._all = {'main': [optimizer]}

    @property
    def param_groups(self):
        return self._all['main'][0].param_groups

    def step(self):
        for optimizer in self._all['main']:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self._all['main']:
            optimizer.zero_grad(set_to_none)
""",
    "weak reference": """
import weakref


class Wrapper:
    def __init__(self, optimizer):
        KEPT.append(optimizer)
        self._reference = weakref.ref(optimizer)

    @property
    def param_groups(self):
        return self._reference().param_groups

    def step(self):
        self._reference().step()

    def zero_grad(self, set_to_none=True):
        self._reference().zero_grad(set_to_none)


KEPT = []
""",
    "iterated": """
class Wrapper:
    def __init__(self, optimizer):
        self._all = (optimizer,)

    def __iter__(self):
        return iter(self._all)

    @property
    def param_groups(self):
        return next(iter(self)).param_groups

    def step(self):
        for each in self:
            each.step()

    def zero_grad(self, set_to_none=True):
        for each in self:
            each.zero_grad(set_to_none)
""",
}


def _parameters(b: Builder, of: str) -> str:
    kind = b.rng.choice(("plain", "plain", "plain", "groups", "list", "tuple groups"))
    if kind == "groups":
        return f"[dict(params=[p], lr=0.02 * (n + 1)) for n, p in enumerate({of}.parameters())]"
    if kind == "tuple groups":
        return (
            f"[dict(params=[p for p in {of}.parameters() if p.ndim > 1]), "
            f"dict(params=[p for p in {of}.parameters() if p.ndim <= 1], lr=0.03)]"
        )
    if kind == "list":
        return f"[p for p in {of}.parameters() if p.requires_grad]"
    return f"{of}.parameters()"


def make_optimizer(b: Builder, name: str, of: str, wanted: Callable[[str], bool]) -> None:
    """An optimizer `name` over the parameters of `of`, maybe one of the program's own, maybe wrapped."""
    parameters = _parameters(b, of)
    own = [key for key in _OWN if wanted(f"optimizer:{key}")]
    if own and b.chance(0.3):
        key = b.rng.choice(own)
        if key == "not an optimizer":
            parameters = f"{of}.parameters()"
        b.add_top(_OWN[key].replace("Own", f"Own{name.capitalize()}"))
        made = f"Own{name.capitalize()}({parameters})"
    else:
        keys = [k for k in TORCH if wanted(f"optimizer:{k}")]
        key = b.rng.choice([k for k in _COMMON if k in keys] if b.chance(0.5) else keys)
        made = TORCH[key].format(p=parameters)
    b.features.append(f"optimizer:{key}")
    b.setup.append(f"{name} = {made}")
    wrappers = [key for key in _WRAPPERS if wanted(f"wrapper:{key}")]
    if wrappers and b.chance(0.35):
        wrapper = b.rng.choice(wrappers)
        b.features.append(f"wrapper:{wrapper}")
        b.add_top(_WRAPPERS[wrapper])
        b.setup.append(f"{name} = Wrapper({name})")
    b.optimizers.append(name)


WRAPPER_NAMES = tuple(f"wrapper:{key}" for key in _WRAPPERS)
OPTIMIZER_NAMES = tuple(f"optimizer:{key}" for key in (*TORCH, *_OWN))
