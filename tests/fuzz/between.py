"""What a user does between two calls: loads a checkpoint, freezes a layer, changes a learning rate, switches a mode."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.program import Builder


def learning_rate(b: Builder) -> None:
    b.after("for group in optimizer.param_groups:\n    group['lr'] = group['lr'] * 0.7")


def decay(b: Builder) -> None:
    b.after("for group in optimizer.param_groups:\n    group['weight_decay'] = 0.01 * (i % 3)")


def freeze(b: Builder) -> None:
    b.after("model.first.weight.requires_grad_(i % 2 == 1)")


def freeze_once(b: Builder) -> None:
    b.after("if i == 2:\n    model.first.requires_grad_(False)")


def evaluate(b: Builder) -> None:
    b.after("model.train(i % 3 != 1)")


def checkpoint_model(b: Builder) -> None:
    b.setup.append("saved = None")
    b.assigned_between.add("saved")
    b.after("if i == 1:\n    saved = copy.deepcopy(model.state_dict())\nif i == 3:\n    model.load_state_dict(saved)")


def checkpoint_optimizer(b: Builder) -> None:
    b.setup.append("saved_optimizer = None")
    b.assigned_between.add("saved_optimizer")
    b.after(
        "if i == 1 and hasattr(optimizer, 'state_dict'):\n    saved_optimizer = copy.deepcopy(optimizer.state_dict())",
        "if i == 3 and hasattr(optimizer, 'state_dict'):",
        "    try:",
        "        optimizer.load_state_dict(saved_optimizer)",
        "    except ValueError:  # a group was added since",
        "        pass",
    )


def batch_size(b: Builder) -> None:
    b.batch = b.rng.choice(("4 + i % 2", "3 + i // 2", "2 + i % 3", "4 if i < 3 else 5"))


def scale_weights(b: Builder) -> None:
    b.after("with torch.no_grad():\n    model.first.weight.mul_(0.9)")


def new_weights(b: Builder) -> None:
    b.after("if i == 2:\n    model.first.weight = nn.Parameter(model.first.weight.detach() * 0.5)")


def weights_data(b: Builder) -> None:
    b.after("if i == 2:\n    model.first.weight.data = model.first.weight.data * 0.5")


def gradient_kept(b: Builder) -> None:
    b.after("model.first.weight.grad = torch.ones_like(model.first.weight) * i")


def no_gradient(b: Builder) -> None:
    b.after("if i % 2:\n    model.first.weight.grad = None")


def new_group(b: Builder) -> None:
    b.setup.append("extra = nn.Parameter(torch.ones(4))")
    b.step("forward", "h = h * extra")
    b.after("if i == 2:\n    optimizer.param_groups[0]['params'].append(extra)")


def seed(b: Builder) -> None:
    b.after("torch.manual_seed(i)")


def precision(b: Builder) -> None:
    b.after("torch.set_float32_matmul_precision(('highest', 'high', 'medium')[i % 3])")


def deterministic(b: Builder) -> None:
    b.after("torch.use_deterministic_algorithms(i % 2 == 0)")


def anomaly(b: Builder) -> None:
    b.after("torch.autograd.set_detect_anomaly(i == 2)")


def default_dtype(b: Builder) -> None:
    b.step("loss", "loss = loss + (torch.ones(2) / 3).sum()")
    b.after("torch.set_default_dtype(torch.float64 if i == 2 else torch.float32)")


def other_model(b: Builder) -> None:
    b.assigned_between.add("model")
    if b.form in ("method", "callable"):
        b.after("if i == 3:\n    trainer.model.first = nn.Linear(3, 4)")
    else:
        b.after("if i == 3:\n    model.first = nn.Linear(3, 4)")


def state_cleared(b: Builder) -> None:
    b.after("if i == 2 and hasattr(optimizer, 'state'):\n    optimizer.state.clear()")


def eager_forward(b: Builder) -> None:
    b.after("model(batch(i, 2, 3)).sum().backward()")


def garbage(b: Builder) -> None:
    b.after("import gc\ngc.collect()")


BETWEEN: dict[str, Callable[[Builder], None]] = {
    f"between:{each.__name__}": each for each in list(globals().values()) if getattr(each, "__module__", "") == __name__
}
"""All functions of this file, in its order."""
