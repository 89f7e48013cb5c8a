# SPDX-License-Identifier: Apache-2.0
"""The table of public ops that the contract tests walk: how to make a good call, and what each argument may be.

A new op joins bad input, layouts, poison and empty input by one entry here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cases
import rooftile as rt
import torch

ACTIVATIONS = frozenset(cases.DTYPES)


@dataclass(frozen=True)
class Tensor:
    """One tensor argument. dtypes: those that can be right in some call; a dtype outside is always refused."""

    dtypes: frozenset = ACTIVATIONS
    optional: bool = False
    written: bool = False
    primary: bool = False  # others are measured against it: an error may name them instead
    free_dims: tuple = ()  # dimensions that no other argument is tied to
    bad_values: tuple = ()  # for index tensors: values that are out of range
    expandable: tuple = ()  # dimensions along which a stride of 0 is a legal input


@dataclass(frozen=True)
class Scalar:
    """A number, a choice or a flag. bad: values of the right type that are out of range."""

    kind: type = float
    optional: bool = False
    bad: tuple = ()


@dataclass
class Call:
    """A good call: its arguments, and the guarded memory behind every tensor of it."""

    op: "Op"
    kwargs: dict
    guards: list

    def guard(self, name):
        return next(g for g in self.guards if g.tensor is self.kwargs[name])

    def run(self, **changes):
        return self.op.function(**{**self.kwargs, **changes})

    def written(self):
        """What a good call leaves behind: every tensor it writes."""
        return [self.kwargs[name] for name in self.op.tensors(written=True) if self.kwargs.get(name) is not None]


@dataclass(frozen=True)
class Op:
    name: str
    function: Callable
    arguments: dict  # name -> Tensor or Scalar
    build: Callable  # (Make) -> kwargs
    empties: tuple = ()  # further builds, with dimensions of size 0

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
        return self._guard(shape, dtype, torch.from_numpy(data).to(cases.torch_dtype(dtype)))

    def index(self, values, dtype="int32"):
        values = torch.as_tensor(values, dtype=cases.torch_dtype(dtype))
        return self._guard(tuple(values.shape), dtype, values)

    def output(self, *shape, dtype=None):
        return self._guard(shape, dtype or self.dtype)

    def _guard(self, shape, dtype, values=None):
        guard = cases.guarded(shape, dtype, self.device, values=values)
        self.guards.append(guard)
        return guard.tensor


OUT = Tensor(written=True, optional=True)
EPS = Scalar(bad=(-1.0, -1e-30, float("nan"), float("inf")))


def _norm_weight(**more):
    return Tensor(optional=True, **more)


OPS = [
    Op(
        "rms_norm",
        rt.rms_norm,
        {
            "x": Tensor(primary=True, expandable=(0, 1)),
            "weight": _norm_weight(),
            "eps": EPS,
            "out": OUT,
        },
        lambda m: {"x": m.input(2, 3, 37), "weight": m.input(37, mean=1.0), "eps": 1e-5, "out": m.output(2, 3, 37)},
        empties=(
            lambda m: {"x": m.input(0, 3, 37), "weight": m.input(37), "eps": 1e-5, "out": m.output(0, 3, 37)},
            lambda m: {"x": m.input(2, 0, 37), "weight": m.input(37), "eps": 1e-5, "out": m.output(2, 0, 37)},
        ),
    ),
]
