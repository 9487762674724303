"""What wholestep relies on in `torch_private/modules_and_optimizers.py`."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torch_private.contract_table import contracts_of
from wholestep.torch_private import modules_and_optimizers as own

of = contracts_of("modules_and_optimizers")


@of("MODULE_INTERNALS", "OPTIMIZER_INTERNALS")
def new_modules_and_optimizers_have_only_attributes_of_torch() -> None:
    class Mine(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.mine = 3

    assert set(vars(Mine())) - own.MODULE_INTERNALS == {"in_features", "out_features", "mine", "training"}
    stepped = torch.optim.AdamW(nn.Linear(2, 2).parameters(), fused=True)
    torch.optim.lr_scheduler.StepLR(stepped, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stepped.step()
    assert set(vars(stepped)) - own.OPTIMIZER_INTERNALS - {"step", "_patch_step_function"} == set()


@of("MODULE_APPLY", "PARAMETER_ACCESS_METHODS")
def conversions_and_reads_of_parameters_pass_these_methods() -> None:
    seen = list[str]()
    uses = {
        "_apply": lambda: nn.Linear(2, 2).half(),
        "_named_members": lambda: (list(nn.Linear(2, 2).parameters()), list(nn.Linear(2, 2).buffers())),
        "train": lambda: nn.Linear(2, 2).eval(),
        "__getstate__": lambda: copy.deepcopy(torch.optim.SGD([torch.zeros(1)])),
    }
    for kind, name in own.PARAMETER_ACCESS_METHODS:
        original = vars(kind)[name]

        def watched(self: Any, *args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            seen.append(_name)
            return _original(self, *args, **kwargs)

        setattr(kind, name, watched)
        try:
            uses[name]()
        finally:
            setattr(kind, name, original)
    assert set(seen) == set(uses)
    assert own.MODULE_APPLY in uses


@of("RNN_WEIGHTS_CHANGED")
def a_recurrent_layer_asks_whether_its_weights_changed() -> None:
    layer = nn.GRU(2, 2)
    assert getattr(layer, own.RNN_WEIGHTS_CHANGED)() is False
    vars(layer)["_parameters"]["weight_ih_l0"] = nn.Parameter(torch.zeros(6, 2))
    assert getattr(layer, own.RNN_WEIGHTS_CHANGED)() is True


@of("SCALER_TENSORS", "SCALER_NUMBERS", "SCALER_SETTINGS", "SCALER_STEP", "SCALER_UNSCALE")
def a_scaler_keeps_its_state_in_these_attributes() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=5)
    assert [getattr(scaler, name) for name in own.SCALER_NUMBERS] == [3.0, 0.25, 5]
    assert [getattr(scaler, name) for name in own.SCALER_SETTINGS] == [True, 8.0]
    assert [getattr(scaler, name) for name in own.SCALER_TENSORS] == [None, None]
    weight = nn.Parameter(torch.ones(2))
    optimizer, called = torch.optim.SGD([weight], lr=1.0), list[str]()
    for name in (own.SCALER_UNSCALE, own.SCALER_STEP):
        original = getattr(scaler, name)

        def watched(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            called.append(_name)
            return _original(*args, **kwargs)

        setattr(scaler, name, watched)
    scaler.scale((weight * 2).sum()).backward()
    assert [getattr(scaler, name).item() for name in own.SCALER_TENSORS] == [8, 0]
    scaler.step(optimizer)
    scaler.update()
    assert called == [own.SCALER_UNSCALE, own.SCALER_STEP]
    assert weight.tolist() == [-1, -1]
    found = scaler._unscale_grads_(optimizer, torch.tensor(1.0), torch.tensor(0.0), True)
    assert [each.item() for each in found.values()] == [0]


@of("VALIDATION_OF_DISTRIBUTIONS", "validate_distributions")
def distributions_read_one_attribute_before_they_validate() -> None:
    before = own.validate_distributions(False)
    try:
        assert not getattr(torch.distributions.Normal(0.0, -1.0), own.VALIDATION_OF_DISTRIBUTIONS)
    finally:
        assert own.validate_distributions(before) is False
    assert getattr(torch.distributions.Normal(0.0, 1.0), own.VALIDATION_OF_DISTRIBUTIONS) is before


@of("adafactor_module")
def adafactor_reads_min_and_max_as_globals_of_its_module() -> None:
    module, seen = own.adafactor_module(), list[float]()
    module.min = lambda *args: seen.append(args[0]) or min(*args)
    try:
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        torch.optim.Adafactor([weight], lr=0.1).step()
    finally:
        del module.min
    assert seen == [0.1]


@of("mark_stepped")
def a_scheduler_does_not_warn_after_a_marked_step() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    own.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


@of("step_behind_hooks")
def the_step_of_an_optimizer_is_wrapped_once_and_marked() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    plain = vars(Mine)["step"]
    assert own.step_behind_hooks(plain) is plain
    Mine([nn.Parameter(torch.ones(1))])
    assert vars(Mine)["step"] is not plain
    assert own.step_behind_hooks(vars(Mine)["step"]) is plain


@of(
    "optimizer_step_hooks",
    "hook_registries",
    "module_hooks",
    "global_module_hooks",
    "forward_hooks",
    "GLOBAL_PRE_HOOKS",
)
def hooks_are_found_where_torch_stores_them() -> None:
    module, optimizer = nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(1))])
    everything = own.hook_registries([module], [optimizer])

    def hook(*args: Any) -> None: ...

    def lengths() -> int:
        return sum(map(len, everything))

    at_module = (
        module.register_forward_pre_hook,
        module.register_forward_hook,
        module.register_full_backward_pre_hook,
        module.register_full_backward_hook,
    )
    for_all = (
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
    )
    at_optimizer = (optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
    of_all = (
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    )
    groups: list[tuple[Any, Any]] = [
        (at_module, lambda: own.module_hooks(module)),
        (for_all, own.global_module_hooks),
        ((*at_optimizer, *of_all), lambda: own.optimizer_step_hooks(optimizer)),
    ]
    for registered, found in groups:
        before, handles = lengths(), list[Any]()
        others = len(found())
        for register in registered:
            handles.append(register(hook))
            assert found().count(hook) == len(handles)
            assert lengths() == before + len(handles)
        for handle in handles:
            handle.remove()
        assert len(found()) == others
    pre, post = own.forward_hooks(module)
    handle = module.register_forward_hook(hook)
    assert (list(pre.values()), list(post.values())) == ([], [hook])
    del post[handle.id]
    assert own.module_hooks(module) == []
    ran = list[str]()
    forwards, steps = own.GLOBAL_PRE_HOOKS
    forwards["contract"] = lambda m, args: ran.append("forward")
    steps["contract"] = lambda o, args, kwargs: ran.append("step")
    try:
        module(torch.ones(2))
        optimizer.step()
    finally:
        del forwards["contract"], steps["contract"]
    assert ran == ["forward", "step"]


@of("weight_computing_hooks")
def weight_norm_is_a_hook_of_these_types() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.utils.weight_norm(nn.Linear(2, 2))
    spectral = nn.utils.spectral_norm(nn.Linear(2, 2))
    kinds = own.weight_computing_hooks()
    assert all(isinstance(hook, kinds) for each in (module, spectral) for hook in own.module_hooks(each))


@of("packing_functions")
def packed_sequences_are_made_by_these_functions() -> None:
    pack, pad = own.packing_functions()
    data, sizes = pack(torch.arange(6.0).view(3, 2), torch.tensor([3, 2]), False)
    assert (data.tolist(), sizes.tolist()) == ([0, 1, 2, 3, 4], [2, 2, 1])
    padded, lengths = pad(data, sizes, False, 0.0, 3)
    assert (padded.tolist(), lengths.tolist()) == ([[0, 1], [2, 3], [4, 0]], [3, 2])


@of("python_function_of")
def a_scripted_function_knows_its_python() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(_twice)
    assert own.python_function_of(scripted) is _twice
    assert own.python_function_of(_twice) is None


def _twice(x: Tensor) -> Tensor:
    return x * 2


@of("CLIP_MODULE", "TOTAL_NORM", "SCALE_BY_NORM")
def clipping_calls_its_two_halves_by_name() -> None:
    called = list[str]()
    for name in (own.TOTAL_NORM, own.SCALE_BY_NORM):
        original = vars(own.CLIP_MODULE)[name]

        def watched(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            called.append(_name)
            return _original(*args, **kwargs)

        setattr(own.CLIP_MODULE, name, watched)
        try:
            weight = nn.Parameter(torch.ones(4))
            weight.grad = torch.ones(4)
            assert torch.nn.utils.clip_grad_norm_([weight], 1.0).item() == 2
        finally:
            setattr(own.CLIP_MODULE, name, original)
    assert called == [own.TOTAL_NORM, own.SCALE_BY_NORM]


@of("is_non_persistent")
def a_module_knows_which_buffers_are_not_saved() -> None:
    module = nn.Module()
    module.register_buffer("a", torch.ones(1))
    module.register_buffer("b", torch.ones(1), persistent=False)
    assert [own.is_non_persistent(module, name) for name in "ab"] == [False, True]


@of("incompatible_keys")
def load_state_dict_returns_this_type() -> None:
    found = nn.Linear(1, 1).load_state_dict({"more": torch.ones(1)}, strict=False)
    assert type(found) is type(own.incompatible_keys([], []))
    assert found == own.incompatible_keys(["weight", "bias"], ["more"])
