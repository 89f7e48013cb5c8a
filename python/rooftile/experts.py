# SPDX-License-Identifier: Apache-2.0
"""Experts of a mixture-of-experts layer in 4 or 8 bits. Needs torch, and not transformers: its modules are known by
what they hold."""

from dataclasses import dataclass

import torch

from rooftile._arrays import aligned, as_torch, shown, torch_device
from rooftile._calls import refuse_export
from rooftile.errors import ArgumentError
from rooftile.gemm import ARRAYS, WEIGHTS, w4a16_matmul, w8a16_matmul
from rooftile.kv_cache import integer
from rooftile.nn import Marked, Packed

_MATMUL = {4: w4a16_matmul, 8: w8a16_matmul}
STACKS = {"gate_up_proj": "gate_up", "down_proj": "down"}  # a parameter of transformers: the PackedStack in its place


class PackedStack(Packed):
    """Weights [out_features, in_features] of several experts, of one kind, group size and scale dtype.

    stack[i] is expert i's W4Weight or W8Weight over this module's buffers, which are [experts, bytes] (`perm`
    [experts, in_features]).
    """

    def __init__(
        self,
        experts,
        in_features,
        out_features,
        *,
        bits=4,
        group_size=128,
        kind="symmetric",
        scale_dtype="float16",
        act_order=False,
        device=None,
    ):
        super().__init__()
        if type(bits) is not int or bits not in WEIGHTS:
            raise ArgumentError(f"PackedStack: bits must be {' or '.join(map(str, WEIGHTS))}, got {shown(bits)}")
        self.WEIGHT = WEIGHTS[bits]
        leading = (integer("PackedStack", "experts", experts, 1),)
        device = torch_device("PackedStack", device)
        self._allocate(in_features, out_features, group_size, kind, scale_dtype, act_order, device, leading)

    @classmethod
    def from_weights(cls, weights):
        """weights: one W4Weight or W8Weight for each expert; see `alike`. The stack holds copies."""
        weights = alike("PackedStack.from_weights", weights)
        self = cls.__new__(cls)
        torch.nn.Module.__init__(self)
        self.WEIGHT = type(weights[0])
        arrays = ([getattr(w, name) for w in weights] for name in ARRAYS)
        stacked = [None if a[0] is None else torch.stack([as_torch(x) for x in a]) for a in arrays]
        self._hold(stacked, weights[0].layout)
        return self

    @classmethod
    def rounded(cls, weights, rounding):
        """weights: one [out_features, in_features] for each expert. rounding: a W4A16 or W8A16."""
        return cls.from_weights([rounding.weight_of(w) for w in weights])

    def __len__(self):
        return len(self.codes)

    def __getitem__(self, expert):
        arrays = self._held()
        try:
            own = [None if a is None else a[expert] for a in arrays]
        except RuntimeError:  # torch's: no such place in the storage
            for name, array in zip(ARRAYS, arrays, strict=True):
                if array is not None and (held := array.untyped_storage().nbytes()) < array.nbytes:
                    raise ArgumentError(
                        f"PackedStack: {name} needs {array.nbytes} bytes of its storage, which was resized to {held}"
                    ) from None
            raise
        return self.WEIGHT._of_module(own, self._layout)

    def extra_repr(self):
        return (
            f"experts={len(self)}, in_features={self.in_features}, out_features={self.out_features}, "
            f"{self._layout_repr()}"
        )


def alike(op, weights):
    """The weights as a list, lossless: where some have integer zeros all have, where some have an act-order all have.

    Raises ArgumentError, beginning with `op`, where one has another class, shape, group size or scale dtype than the
    first, or minima where another has none.
    """
    weights = list(weights)
    first = weights[0]
    for i, w in enumerate(weights):
        if type(w) is not type(first):
            raise ArgumentError(f"{op}: expert {i} must be a {type(first).__name__}, got a {type(w).__name__}")
        for what in ("shape", "group_size", "scale_dtype"):
            ours, theirs = getattr(w, what), getattr(first, what)
            if ours != theirs:
                raise ArgumentError(f"{op}: expert {i} must have the first one's {what} = {theirs}, got {ours}")
    kinds, act_order = {w.kind for w in weights}, any(w.perm is not None for w in weights)
    if kinds == {"symmetric", "integer"}:
        kinds = {"integer"}
    if len(kinds) > 1:
        raise ArgumentError(f"{op}: experts must be of one kind, got {' and '.join(sorted(kinds))}")
    (kind,) = kinds
    return [_with(w, kind, act_order) for w in weights]


def _with(w, kind, act_order):
    """The weight with zeros of this kind, and with a perm where act_order."""
    if w.kind == kind and (w.perm is not None) == act_order:
        return w
    codes, scales, zeros = w.unpack()
    if w.kind != kind:
        zeros = torch.full_like(scales, 2 ** (w.BITS - 1), dtype=torch.uint8)
    perm = w.perm
    if act_order and perm is None:
        perm = torch.arange(w.shape[1], dtype=torch.int32, device=scales.device)
    return type(w).from_canonical(codes, scales, zeros, group_size=w.group_size, kind=kind, perm=perm)


def stack_rows(*parts):
    """The PackedStack of weights given in parts, such as gates and ups: of each expert the rows of all parts, one below
    the other. parts: lists of one weight for each expert. Lossless; errors as of `alike`, and ArgumentError where an
    expert's parts have another act-order."""
    each = alike("stack_rows", [w for part in parts for w in part])
    count = len(parts[0])
    rows = [each[i::count] for i in range(count)]
    return PackedStack.from_weights([r[0] if len(r) == 1 else type(r[0]).concat(r) for r in rows])


# ---------------------------------------------------------------- what lies between the two products


@dataclass(frozen=True)
class Activated:
    """activation(gate) * up of rows [gate | up], which the first product does itself."""

    activation: str  # as w4a16_matmul takes it
    interleaved = False

    def __call__(self, matmul, x, w, bias):
        return matmul(x, w, bias=bias, activation=self.activation)


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate) of rows gate, up, gate, up, .., both clamped to `limit`: gpt-oss's."""

    alpha: float
    limit: float
    interleaved = True

    def __call__(self, matmul, x, w, bias):
        return self.of(matmul(x, w, bias=bias))

    def of(self, gate_up):
        gate, up = gate_up[..., 0::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


_ACTIVATIONS = {
    "silu_mul": torch.nn.functional.silu,
    "gelu_mul": torch.nn.functional.gelu,
    "gelu_tanh_mul": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def _gate_of(module):
    """The gate that computes what the module's own does, found by asking it; None where there is none."""
    probe = torch.linspace(-12, 12, 96, device="cpu").view(12, 8).T.contiguous()  # every column meets large and small
    with torch.no_grad():
        theirs = module._apply_gate(probe)
        candidates = [(Activated(name), f(probe[:, :6]) * probe[:, 6:]) for name, f in _ACTIVATIONS.items()]
        alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
        if isinstance(alpha, float | int) and isinstance(limit, float | int):
            clamped = ClampedSwiglu(float(alpha), float(limit))
            candidates.append((clamped, clamped.of(probe)))
    return next((gate for gate, ours in candidates if torch.allclose(theirs, ours, rtol=1e-5, atol=1e-6)), None)


@dataclass(frozen=True)
class ExpertsForm:
    """What a transformers experts module holds: [E, 2 I, H] and [E, I, H], transposed or not, and its gate."""

    experts: int
    hidden: int
    intermediate: int
    transposed: bool
    gate: object

    def shape(self, name):
        """[out_features, in_features] of one expert's gate_up_proj or down_proj."""
        if name == "gate_up_proj":
            return 2 * self.intermediate, self.hidden
        return self.hidden, self.intermediate

    def each(self, value):
        """[out_features, in_features] of one expert after the other, of a parameter as transformers holds it."""
        return (w.T if self.transposed else w for w in value.detach())

    def fused(self, weights):
        """What transformers holds, of what `each` gives."""
        return torch.stack([w.T if self.transposed else w for w in weights])


def experts_form(module):
    """The ExpertsForm of a module that `PackedExperts` can stand for, else None.

    Such a module holds `gate_up_proj` and `down_proj` [experts, ., .] (and perhaps a `_bias` of each) and nothing else,
    says by `is_transposed` and `has_bias` how, and has a gate of a kind that is known here: what transformers'
    Mixtral, Qwen2-MoE, Qwen3-MoE, gpt-oss and many more have in common.
    """
    held = dict(module.named_parameters())
    biases = {f"{name}_bias" for name in STACKS}
    if not STACKS.keys() <= held.keys() <= STACKS.keys() | biases or any(held[n].ndim != 3 for n in STACKS):
        return None
    if not callable(getattr(module, "_apply_gate", None)) or getattr(module, "has_post_expert_norm", False):
        return None
    transposed = getattr(module, "is_transposed", None)
    if type(transposed) is not bool or not getattr(module, "has_gate", False):
        return None
    (e, *up), (e2, *down) = held["gate_up_proj"].shape, held["down_proj"].shape
    if transposed:
        up, down = up[::-1], down[::-1]
    if e != e2 or up != [2 * down[1], down[0]] or len(held) != (4 if getattr(module, "has_bias", False) else 2):
        return None
    gate = _gate_of(module)
    return None if gate is None else ExpertsForm(e, down[0], down[1], transposed, gate)


class PackedExperts(Marked):
    """Experts of a mixture-of-experts layer: for each token, the sum over its experts of weight * down(gate(up(x))).

    `gate_up` and `down` are PackedStacks; biases keep transformers' names and dtype. Made empty of a transformers
    module (`experts_form`), whose parameters it takes over until `pack` puts a stack in the place of each.

    A loop over the experts that were chosen, two products each. Deterministic; the experts' outputs of a token are
    added in fp32 in the order of its choices. The host reads which experts were chosen, so on a GPU every call waits
    for it, and a call cannot be captured in a CUDA graph; torch.compile breaks its graph here.
    """

    # of three dimensions, and two in the middle, since save_pretrained takes fused experts apart: gates and ups, each
    MARKER = ("gate_up_proj", (1, 2, 1))

    def __init__(self, module, form):
        super().__init__()
        self.form = form
        self.gate_up = self.down = None
        for name, parameter in module.named_parameters():
            self.register_parameter(name, parameter.requires_grad_(False))

    def pack(self, name, stack):
        """stack: the PackedStack of gate_up_proj or down_proj."""
        n, k = self.form.shape(name)
        if (len(stack), stack.out_features, stack.in_features) != (self.form.experts, n, k):
            raise ArgumentError(
                f"PackedExperts: {name} must be {self.form.experts} of [{n}, {k}], got {len(stack)} of "
                f"[{stack.out_features}, {stack.in_features}]"
            )
        self._parameters.pop(name, None)
        setattr(self, STACKS[name], stack)

    def round(self, name, value, rounding):
        """pack, of a tensor as transformers holds it, rounded to nearest."""
        self.pack(name, PackedStack.rounded(self.form.each(aligned(value)), rounding))

    @torch.compiler.disable
    def forward(self, hidden_states, top_k_index, top_k_weights):
        """hidden_states: [tokens, hidden]; top_k_index, top_k_weights: [tokens, k]. An index that is no expert's adds
        nothing. Returns [tokens, hidden] in hidden_states' dtype."""
        refuse_export("PackedExperts", "which experts were chosen is read on the host")
        tokens, k = top_k_index.shape
        experts, chosen = self.form.experts, top_k_index.reshape(-1)
        chosen = chosen.masked_fill((chosen < 0) | (chosen > experts), experts)  # no expert's: behind all that are
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=experts).tolist()
        x = hidden_states[order // k]
        y = torch.zeros_like(x)
        begin = 0
        for expert, count in enumerate(counts[:experts]):
            if count:
                self._expert(expert, x[begin : begin + count], y[begin : begin + count])
                begin += count
        each = torch.empty_like(y)
        each[order] = y
        weighted = each.view(tokens, k, self.form.hidden).float() * top_k_weights.float().unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    def _expert(self, expert, x, out):
        up, down = self.gate_up[expert], self.down[expert]
        biases = (self._parameters.get(f"{name}_bias") for name in STACKS)
        up_bias, down_bias = (None if b is None else b[expert] for b in biases)
        h = self.form.gate(_MATMUL[up.BITS], x, up, up_bias)
        _MATMUL[down.BITS](h, down, bias=down_bias, out=out)

    def extra_repr(self):
        return f"experts={self.form.experts}, {self.form.gate}"
