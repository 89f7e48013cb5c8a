# SPDX-License-Identifier: Apache-2.0
"""The table of public ops that the contract tests walk: how to make a good call, and what each argument may be.

A new op joins bad input, layouts, poison, empty input and row independence by one entry here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import cases
import rooftile as rt
import torch

ACTIVATIONS = frozenset(cases.DTYPES)
INDICES = frozenset(["int32", "int64"])


@dataclass(frozen=True)
class Tensor:
    """One tensor argument. dtypes: those that can be right in some call; a dtype outside is always refused."""

    dtypes: frozenset = ACTIVATIONS
    optional: bool = False
    written: bool = False
    primary: bool = False  # others are measured against it: an error may name them instead
    free_dims: tuple = ()  # dimensions that no other argument is tied to
    bad_values: tuple = ()  # of index tensors: out of range
    expandable: tuple = ()  # dimensions along which a stride of 0 is a legal input
    rows: int | None = None  # the dimension that counts independent rows


@dataclass(frozen=True)
class Scalar:
    """A number, a choice or a flag. bad: values of the right type that are out of range."""

    kind: type = float
    optional: bool = False
    bad: tuple = ()
    bits: int = 32


@dataclass(frozen=True)
class Object:
    """A cache or a weight. wrong: dtype -> {label: one of the right type that does not fit the call}."""

    wrong: Callable = lambda dtype: {}


@dataclass
class Call:
    """A good call: its arguments, and the guarded memory behind every tensor of it."""

    op: "Op"
    kwargs: dict
    guards: list
    before: list = field(default_factory=list)

    def __post_init__(self):
        self.before = [t.clone() for t in self.op.state(self.kwargs)]

    def guard(self, name):
        return next(g for g in self.guards if g.tensor is self.kwargs[name])

    def run(self, **changes):
        return self.op.function(**{**self.kwargs, **changes})

    def written(self):
        """What a good call leaves behind: every tensor it writes, and the state of what it changes."""
        outputs = [self.kwargs[name] for name in self.op.tensors(written=True) if self.kwargs.get(name) is not None]
        return outputs + self.op.state(self.kwargs)

    def check_untouched(self):
        for guard in self.guards:
            guard.check_untouched("an argument")
        for before, now in zip(self.before, self.op.state(self.kwargs), strict=True):
            assert torch.equal(before.view(torch.uint8), now.view(torch.uint8)), "the cache was written"


@dataclass(frozen=True)
class Op:
    name: str
    function: Callable
    arguments: dict  # name -> Tensor, Scalar or Object, every argument of the function
    build: Callable  # (Make) -> kwargs
    empties: tuple = ()  # further builds, with dimensions of size 0
    large: Callable | None = None  # a build that is worth splitting over threads
    state: Callable = lambda kwargs: []  # tensors behind objects that the op changes

    def call(self, dtype="float32", device="cpu", build=None):
        make = Make(self, dtype, device)
        return Call(self, (build or self.build)(make), make.guards)

    def tensors(self, written=None):
        return [n for n, a in self.arguments.items() if isinstance(a, Tensor) and written in (None, a.written)]


class Make:
    """Makes the arguments of one call. Every tensor lies between poisoned margins."""

    def __init__(self, op, dtype, device):
        self.op, self.dtype, self.device, self.guards = op, dtype, device, []

    def input(self, *shape, dtype=None, spread=1.0, mean=0.0):
        dtype = dtype or self.dtype
        data = cases.values(shape, dtype, self.op.name, len(self.guards), *shape, spread=spread, mean=mean)
        return self.given(torch.from_numpy(data).to(cases.torch_dtype(dtype)))

    def index(self, values, dtype="int32"):
        return self.given(torch.as_tensor(values, dtype=cases.torch_dtype(dtype)))

    def given(self, values):
        return self._guard(tuple(values.shape), values.dtype, values)

    def output(self, *shape, dtype=None):
        return self._guard(shape, dtype or self.dtype)

    def _guard(self, shape, dtype, values=None):
        guard = cases.guarded(shape, dtype, self.device, values=values)
        self.guards.append(guard)
        return guard.tensor


PLAN = Scalar(str, optional=True)
STREAM = Scalar(int, optional=True, bits=64)
CONTEXT = {"stream": STREAM, "plan": PLAN}
EPS = Scalar(bad=(-1.0, -1e-30, float("nan"), float("inf"), 1e300))
WEIGHT = Tensor(optional=True)
OUT = Tensor(written=True, optional=True, rows=0)
ROWS = Tensor(primary=True, expandable=(0, 1), rows=0)


HIDDEN = 37  # a full vector, and a tail of every width


def _norm(*lead, bias=False, adds=False):
    def build(m):
        kwargs = {"x": m.input(*lead, HIDDEN), "weight": m.input(HIDDEN, mean=1.0), "eps": 1e-5}
        if bias:
            kwargs["bias"] = m.input(HIDDEN)
        if adds:
            kwargs |= {"residual": m.input(*lead, HIDDEN), "residual_out": m.output(*lead, HIDDEN)}
        return kwargs | {"out": m.output(*lead, HIDDEN)}

    return build


def _norm_op(function, bias=False, adds=False):
    arguments = {"x": ROWS, "weight": WEIGHT, "eps": EPS, "out": OUT, **CONTEXT}
    if bias:
        arguments["bias"] = WEIGHT
    if adds:
        arguments |= {"residual": Tensor(expandable=(0, 1), rows=0), "residual_out": OUT}

    def norm(*lead):
        return _norm(*lead, bias=bias, adds=adds)

    return Op(
        function.__name__,
        function,
        arguments,
        norm(2, 3),
        empties=(norm(0, 3), norm(2, 0), norm(0)),
        large=norm(67, 9),
    )


def _rope(batch, tokens, heads=3, kv_heads=1, dim=22, pairs=9, index="int64"):
    """Fewer pairs than half the dimensions: what lies past them is copied."""

    def build(m):
        positions = cases.generator("positions").integers(0, 50, (batch, tokens))
        return {
            "q": m.input(batch, tokens, heads, dim),
            "k": m.input(batch, tokens, kv_heads, dim),
            "cos": m.input(50, pairs),
            "sin": m.input(50, pairs),
            "positions": m.index(positions, index),
            "q_out": m.output(batch, tokens, heads, dim),
            "k_out": m.output(batch, tokens, kv_heads, dim),
        }

    return build


def _gated(*lead, **more):
    return lambda m: {"gate_up": m.input(*lead, 2 * HIDDEN, spread=3.0), "out": m.output(*lead, HIDDEN), **more}


def _softmax(*lead):
    return lambda m: {"x": m.input(*lead, HIDDEN, spread=3.0), "out": m.output(*lead, HIDDEN)}


TABLE = Tensor(primary=True)
POSITIONS = Tensor(INDICES, bad_values=(-1, 50, 2**31 - 1, -(2**31)), expandable=(0, 1), rows=0)

OPS = [
    _norm_op(rt.rms_norm),
    _norm_op(rt.add_rms_norm, adds=True),
    _norm_op(rt.layer_norm, bias=True),
    _norm_op(rt.add_layer_norm, bias=True, adds=True),
    Op(
        "rope",
        rt.rope,
        {
            "q": ROWS,
            "k": ROWS,
            "cos": TABLE,
            "sin": TABLE,
            "positions": POSITIONS,
            "q_out": OUT,
            "k_out": OUT,
            **CONTEXT,
        },
        _rope(2, 3),
        empties=(_rope(0, 3), _rope(2, 0)),
        large=_rope(17, 33, index="int32"),
    ),
    Op(
        "silu_mul",
        rt.silu_mul,
        {"gate_up": ROWS, "out": OUT, **CONTEXT},
        _gated(2, 3),
        empties=(_gated(0, 3), _gated(2, 0), _gated(0)),
        large=_gated(67, 9),
    ),
    Op(
        "gelu_mul",
        rt.gelu_mul,
        {"gate_up": ROWS, "approximate": Scalar(str, bad=("erf", "TANH")), "out": OUT, **CONTEXT},
        _gated(2, 3, approximate="tanh"),
        empties=(_gated(0, 3, approximate="none"), _gated(2, 0, approximate="tanh")),
        large=_gated(67, 9, approximate="none"),
    ),
    Op(
        "softmax",
        rt.softmax,
        {"x": ROWS, "out": OUT, **CONTEXT},
        _softmax(2, 3),
        empties=(_softmax(0, 3), _softmax(2, 0), _softmax(0)),
        large=_softmax(67, 9),
    ),
]
