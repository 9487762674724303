"""Where a Python number of a program lives, how the step reads it, and who changes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuzz.program import Builder


@dataclass(frozen=True)
class Home:
    """`read` is an expression in the step; `write` an assignment with {} for the value, None where there is none."""

    read: str
    write: str | None
    write_between: str | None
    in_step: bool = True
    """Whether the step itself may assign: an argument belongs to the caller."""


def variable(b: Builder, value: str) -> Home:
    name = b.name("K")
    b.setup.append(f"{name} = {value}")
    b.assigned_between.add(name)
    return Home(name, f"{name} = {{}}", f"{name} = {{}}")


def argument(b: Builder, value: str) -> Home:
    name = b.name("k")
    b.parameters.append((name, name_of_call(b, value)))
    return Home(name, None, None, in_step=False)


def keyword(b: Builder, value: str) -> Home:
    name = b.name("k")
    b.keywords.append((name, name_of_call(b, value)))
    return Home(name, None, None, in_step=False)


def nested_argument(b: Builder, value: str) -> Home:
    name = b.name("settings")
    form = b.rng.choice(("{{'k': {}}}", "[{}, 1.0]", "({}, 'text')"))
    b.parameters.append((name, form.format(name_of_call(b, value))))
    return Home(f"{name}['k']" if form[0] == "{" else f"{name}[0]", None, None, in_step=False)


def name_of_call(b: Builder, value: str) -> str:
    """The value that the caller passes at call i."""
    if "." in value:
        return b.rng.choice((value, f"{value} + 0.125 * i", f"{value} * 0.5 ** i", f"({value}, 0.25, 1.5)[i % 3]"))
    return b.rng.choice((value, "i % 4", "i % 3", "(1, 1, 2, 3, 0, 2, 1)[i]", "3 - i % 4", "i // 2"))


def module_attribute(b: Builder, value: str) -> Home:
    name = b.name("k")
    b.net_init.append(f"self.{name} = {value}")
    return Home(f"model.{name}", f"model.{name} = {{}}", f"model.{name} = {{}}")


def own_attribute(b: Builder, value: str) -> Home:
    if b.form not in ("method", "callable"):
        return object_attribute(b, value)
    name = b.name("k")
    b.attributes.append(f"self.{name} = {value}")
    return Home(f"self.{name}", f"self.{name} = {{}}", f"trainer.{name} = {{}}")


def _of_class(b: Builder, source: str, value: str, made: str | None = None) -> Home:
    """An object `config1` of a class that is written with NAME and VALUE."""
    name = b.name("Config")
    b.add_top(source.replace("NAME", name).replace("VALUE", value))
    low = name.lower()
    b.setup.append(f"{low} = {made.replace('NAME', name) if made else name + '()'}")
    return Home(f"{low}.k", f"{low}.k = {{}}", f"{low}.k = {{}}")


def object_attribute(b: Builder, value: str) -> Home:
    return _of_class(b, "class NAME:\n    def __init__(self):\n        self.k = VALUE", value)


def namespace(b: Builder, value: str) -> Home:
    name = b.name("config")
    b.setup.append(f"{name} = types.SimpleNamespace(k={value})")
    return Home(f"{name}.k", f"{name}.k = {{}}", f"{name}.k = {{}}")


def slots(b: Builder, value: str) -> Home:
    return _of_class(b, "class NAME:\n    __slots__ = ('k',)\n\n    def __init__(self):\n        self.k = VALUE", value)


def dataclass_object(b: Builder, value: str) -> Home:
    return _of_class(b, "@dataclasses.dataclass\nclass NAME:\n    k: float = VALUE", value)


def frozen_dataclass(b: Builder, value: str) -> Home:
    home = _of_class(b, "@dataclasses.dataclass(frozen=True)\nclass NAME:\n    k: float = VALUE", value)
    name = home.read.split(".")[0]
    b.assigned_between.add(name)
    return Home(home.read, None, f"{name} = dataclasses.replace({name}, k={{}})", in_step=False)


def getattr_config(b: Builder, value: str) -> Home:
    source = """\
class NAME:
    def __init__(self):
        self._values = {'k': VALUE}

    def __getattr__(self, name):
        try:
            return self.__dict__['_values'][name]
        except KeyError:
            raise AttributeError(name) from None"""
    name = _of_class(b, source, value).read.split(".")[0]
    return Home(f"{name}.k", None, f"{name}._values['k'] = {{}}", in_step=False)


def property_of_object(b: Builder, value: str) -> Home:
    source = """\
class NAME:
    def __init__(self):
        self._k = VALUE

    @property
    def k(self):
        return self._k"""
    name = _of_class(b, source, value).read.split(".")[0]
    return Home(f"{name}.k", f"{name}._k = {{}}", f"{name}._k = {{}}")


def class_attribute(b: Builder, value: str) -> Home:
    name = b.name("Config")
    b.add_top(f"class {name}:\n    k = {value}")
    return Home(f"{name}.k", f"{name}.k = {{}}", f"{name}.k = {{}}")


def class_attribute_through_object(b: Builder, value: str) -> Home:
    home = _of_class(b, "class NAME:\n    k = VALUE", value)
    kind = home.read.split(".")[0].capitalize()
    return Home(home.read, None, f"{kind}.k = {{}}", in_step=False)


def metaclass_attribute(b: Builder, value: str) -> Home:
    name = b.name("Config")
    b.add_top(f"class Meta{name}(type):\n    k = {value}\n\n\nclass {name}(metaclass=Meta{name}):\n    pass")
    return Home(f"{name}.k", None, f"Meta{name}.k = {{}}", in_step=False)


def group_option(b: Builder, value: str) -> Home:
    name = b.name("k")
    b.setup.append(f"optimizer.param_groups[0]['{name}'] = {value}")
    place = f"optimizer.param_groups[0]['{name}']"
    return Home(place, f"{place} = {{}}", f"{place} = {{}}")


def optimizer_attribute(b: Builder, value: str) -> Home:
    name = b.name("k")
    b.setup.append(f"optimizer.{name} = {value}")
    return Home(f"optimizer.{name}", f"optimizer.{name} = {{}}", f"optimizer.{name} = {{}}")


def dictionary(b: Builder, value: str) -> Home:
    name = b.name("settings")
    b.setup.append(f"{name} = {{'k': {value}, 'name': 'text'}}")
    return Home(f"{name}['k']", None, f"{name}['k'] = {{}}", in_step=False)


def attribute_dictionary(b: Builder, value: str) -> Home:
    name = b.name("Settings")
    b.add_top(f"class {name}(dict):\n    __getattr__ = dict.__getitem__\n    __setattr__ = dict.__setitem__")
    low = name.lower()
    b.setup.append(f"{low} = {name}(a={name}(k={value}), name='text')")
    return Home(f"{low}.a.k", None, f"{low}.a.k = {{}}", in_step=False)


def nested_dictionary(b: Builder, value: str) -> Home:
    name = b.name("settings")
    b.setup.append(f"{name} = {{'a': {{'b': [{{'k': {value}}}]}}}}")
    place = f"{name}['a']['b'][0]['k']"
    return Home(place, None, f"{place} = {{}}", in_step=False)


def list_item(b: Builder, value: str) -> Home:
    name = b.name("numbers")
    b.setup.append(f"{name} = [{value}, 7]")
    return Home(f"{name}[0]", None, f"{name}[0] = {{}}", in_step=False)


def large_list(b: Builder, value: str) -> Home:
    name = b.name("numbers")
    b.setup.append(f"{name} = [{value}] * 400")
    return Home(f"{name}[300]", None, f"{name}[300] = {{}}", in_step=False)


def deep_object(b: Builder, value: str) -> Home:
    name = b.name("deep")
    inner = f"types.SimpleNamespace(k={value})"
    for letter in "gfedcba":
        inner = f"types.SimpleNamespace({letter}={inner})"
    b.setup.append(f"{name} = {inner}")
    place = f"{name}.a.b.c.d.e.f.g.k"
    return Home(place, f"{place} = {{}}", f"{place} = {{}}")


def context_variable(b: Builder, value: str) -> Home:
    name = b.name("variable")
    b.add_top(f"{name} = contextvars.ContextVar('{name}', default={value})")
    return Home(f"{name}.get()", f"{name}.set({{}})", f"{name}.set({{}})")


def thread_local(b: Builder, value: str) -> Home:
    name = b.name("local")
    b.add_top(f"{name} = threading.local()\n{name}.k = {value}")
    return Home(f"{name}.k", f"{name}.k = {{}}", f"{name}.k = {{}}")


def environment(b: Builder, value: str) -> Home:
    name = f"FUZZ_{b.name('K')}"
    kind = "float" if "." in value else "int"
    b.setup.append(f"os.environ['{name}'] = '{value}'")
    written = f"os.environ['{name}'] = str({{}})"
    read = b.rng.choice((f"os.environ['{name}']", f"os.environ.get('{name}', '1')", f"os.getenv('{name}', '1')"))
    return Home(f"{kind}({read})", written, written)


def python_module(b: Builder, value: str) -> Home:
    name = b.name("config")
    b.setup.append(f"{name} = types.ModuleType('{name}')")
    b.setup.append(f"{name}.k = {value}")
    return Home(f"{name}.k", f"{name}.k = {{}}", f"{name}.k = {{}}")


def function_attribute(b: Builder, value: str) -> Home:
    name = b.name("helper")
    b.add_top(f"def {name}(h):\n    return h * {name}.k\n\n\n{name}.k = {value}")
    return Home(f"{name}.k", f"{name}.k = {{}}", f"{name}.k = {{}}")


def default_argument(b: Builder, value: str) -> Home:
    name = b.name("value")
    b.add_top(f"def {name}(k={value}):\n    return k")
    return Home(f"{name}()", None, f"{name}.__defaults__ = ({{}},)", in_step=False)


def getter(b: Builder, value: str) -> Home:
    """A function that reads a variable of its own."""
    name = b.name("K")
    b.setup += [f"{name} = {value}", f"def get_{name}():", f"    return {name}"]
    b.assigned_between.add(name)
    return Home(f"get_{name}()", f"{name} = {{}}", f"{name} = {{}}")


def array_item(b: Builder, value: str) -> Home:
    name = b.name("array")
    b.setup.append(f"{name} = np.array([{value}, 7])")
    kind = "float" if "." in value else "int"
    return Home(f"{kind}({name}[0])", None, f"{name}[0] = {{}}", in_step=False)


def buffer_item(b: Builder, value: str) -> Home:
    name = b.name("count")
    b.net_init.append(f"self.register_buffer('{name}', torch.tensor({value}))")
    return Home(f"model.{name}.item()", None, f"model.{name}.fill_({{}})", in_step=False)


def pair(b: Builder, value: str) -> Home:
    name = b.name("Pair")
    b.add_top(f"class {name}(typing.NamedTuple):\n    k: float\n    other: str = 'text'")
    low = name.lower()
    b.setup.append(f"{low} = {name}({value})")
    b.assigned_between.add(low)
    return Home(f"{low}.k", None, f"{low} = {low}._replace(k={{}})", in_step=False)


def submodule_attribute(b: Builder, value: str) -> Home:
    name = b.name("block")
    b.add_top(
        "class Block(nn.Module):\n    def __init__(self, k):\n        super().__init__()\n        self.k = k\n\n"
        "    def forward(self, h):\n        return h * (1 + 0.1 * self.k)"
    )
    b.net_init.append(f"self.{name} = Block({value})")
    b.net_forward.append(f"h = self.{name}(h)")
    return Home(f"model.{name}.k", f"model.{name}.k = {{}}", f"model.{name}.k = {{}}")


HOMES: dict[str, Callable[[Builder, str], Home]] = {
    f"home:{each.__name__}": each
    for each in (
        variable,
        argument,
        keyword,
        nested_argument,
        module_attribute,
        own_attribute,
        object_attribute,
        namespace,
        slots,
        dataclass_object,
        frozen_dataclass,
        getattr_config,
        property_of_object,
        class_attribute,
        class_attribute_through_object,
        metaclass_attribute,
        group_option,
        optimizer_attribute,
        dictionary,
        attribute_dictionary,
        nested_dictionary,
        list_item,
        large_list,
        deep_object,
        context_variable,
        thread_local,
        environment,
        python_module,
        function_attribute,
        default_argument,
        getter,
        array_item,
        buffer_item,
        pair,
        submodule_attribute,
    )
}

COMMON = ("variable", "argument", "module_attribute", "own_attribute", "object_attribute", "keyword", "group_option")


def change(b: Builder, home: Home, *, whole: bool) -> str:
    """Let the number change, in the step or between calls or not at all; returns what was chosen."""
    ways = ["between", "between", "once", "never"]
    if home.in_step and home.write is not None:
        ways += ["in the step", "in the step", "before use"]
    way = b.rng.choice(ways) if home.write_between is not None else "never"
    if whole:
        new = b.rng.choice(("({k} + 1) % 4", "({k} + 1) % 3", "min({k} + 1, 3)", "{k} ^ 1", "3 - {k}", "abs({k} - 1)"))
    else:
        new = b.rng.choice(("{k} * 0.5", "{k} + 0.125", "1.5 - {k}", "{k} * 0.9 + 0.1", "max({k} - 0.25, 0.25)"))
    new = new.format(k=home.read)
    if way in ("in the step", "before use"):
        assert home.write is not None
        variable_written = home.write.split(" = ")[0]
        if variable_written.isidentifier():
            b.assigned_in_step.add(variable_written)
        b.step("end" if way == "in the step" else "start", home.write.format(new))
    elif way == "between":
        assert home.write_between is not None
        value = (
            new.replace("self.", "trainer.")
            if b.chance(0.6)
            else ("(1, 1, 2, 3, 0, 2, 1)[i]" if whole else "0.25 + 0.125 * i")
        )
        b.after(home.write_between.format(value))
    elif way == "once":
        assert home.write_between is not None
        b.after(f"if i == {b.rng.randrange(1, 4)}:\n    " + home.write_between.format(new.replace("self.", "trainer.")))
    return way
