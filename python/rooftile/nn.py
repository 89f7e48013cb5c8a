# SPDX-License-Identifier: Apache-2.0
"""torch modules. Needs torch; `import rooftile` alone does not load it."""

import functools

import torch

from rooftile import _C
from rooftile._arrays import aligned, as_torch, must_be, shown, torch_device
from rooftile._calls import compiling
from rooftile.errors import ArgumentError, ArgumentTypeError
from rooftile.gemm import ARRAYS, W4_KINDS, W4Weight, W8Weight, w4a16_matmul, w8a16_matmul
from rooftile.kv_cache import integer

_SCALES = ("float16", "bfloat16")
_EXTRA_STATE = "_extra_state"  # as torch calls it in a state_dict

STATE_HOOKS = (  # of a module: they know tensors by name, and a packed one holds others
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_HOOKS = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def take_over(module, before):
    """Gives a module the mode, the hooks and the attributes that it has not got itself of the one `before` it.

    The dicts of the hooks are the same, so a handle that register_forward_hook returned still removes its hook.
    """
    module.train(before.training)
    for name, value in vars(before).items():
        if name in _HOOKS or not hasattr(module, name):
            vars(module)[name] = value


@functools.cache
def own_names(kind):
    """Names that PackedLinear or PackedExperts has a use for: an attribute of such a name cannot go over."""
    return {*dir(kind), *ARRAYS, "_layout", "_weight"}


def check_tensors(module, expected, came, place, dtype_name):
    """Raises ArgumentError where a tensor of a module is missing, or has another shape or dtype: whoever reads it would
    leave random bytes, or convert codes. And where there is an array of a weight that this one has not got: its codes
    would mean something else without it.

    expected: name -> tensor; a dtype of floats may be another one, as a bias's. came: name -> what has shape and dtype,
    or None. place: (name, what came) -> how an error begins. dtype_name: what `came` calls an expected torch.dtype.
    """
    for name in ARRAYS:
        if name not in expected and came.get(name) is not None:
            what = {"offsets": "zeros or minima", "perm": "act-order"}.get(name, name)
            raise ArgumentError(
                f"{place(name, came[name])} is there, but this module has no {what}: {module.extra_repr()}"
            )
    for name, tensor in expected.items():
        found = came.get(name)
        where = place(name, found)
        if found is None:
            together = ", ".join(f"'{other}'" for other in expected)
            raise ArgumentError(f"{where} is missing from the checkpoint; expected {together} together")
        if tuple(found.shape) != tuple(tensor.shape):
            raise ArgumentError(f"{where} has shape {list(found.shape)}, expected {list(tensor.shape)}")
        dtype = dtype_name(tensor.dtype)
        if not tensor.is_floating_point() and found.dtype != dtype:
            theirs, ours = (str(x).removeprefix("torch.") for x in (found.dtype, dtype))
            raise ArgumentError(f"{where} has dtype {theirs}, expected {ours}")


class Marked(torch.nn.Module):
    """A module that stands for one with a parameter of another shape: its state_dict holds a marker of that name.

    No module of transformers takes a marker's shape, so whoever reads the checkpoint without rooftile gets an error
    instead of random weights. MARKER: its name and shape. It is int64: safetensors sorts by element size, and a marker
    of one byte between the codes would put them at odd addresses of the mapped file.
    """

    MARKER = ("weight", (1,))

    @classmethod
    def marker(cls, prefix):
        """{name of the marker: the marker} of such a module whose parameters' names begin with `prefix`."""
        name, shape = cls.MARKER
        return {prefix + name: torch.zeros(shape, dtype=torch.int64, device="cpu")}

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # from_pretrained fills the tensors that a module on the meta device lists; a marker is none to fill
        if not any(buffer.is_meta for buffer in self.buffers()):
            destination |= self.marker(prefix)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        name, shape = self.MARKER
        if prefix + name in unexpected and tuple(state_dict[prefix + name].shape) == shape:
            unexpected.remove(prefix + name)


class Packed(torch.nn.Module):
    """Buffers of weights in packed layout, and what they mean."""

    WEIGHT = None

    def _allocate(self, in_features, out_features, group_size, kind, scale_dtype, act_order, device, leading=()):
        """Empty buffers of one weight, or with a `leading` dimension of several."""
        name, bits, kinds = type(self).__name__, self.WEIGHT.BITS, self.WEIGHT.KINDS
        out_features = integer(name, "out_features", out_features)
        in_features = integer(name, "in_features", in_features, 1)
        if not isinstance(kind, str) or kind not in kinds:
            raise ArgumentError(f"{name}: kind {must_be(kinds, kind)}")
        if not isinstance(scale_dtype, str) or scale_dtype not in _SCALES:
            raise ArgumentTypeError(f"{name}: scale_dtype {must_be(_SCALES, scale_dtype)}")
        codes, scales, offsets = _C.w4_sizes(name, "in_features", out_features, in_features, bits, group_size, kind)

        def buffer(size):
            return torch.zeros((*leading, size), dtype=torch.uint8, device=device)

        perm = None
        if act_order:
            perm = torch.arange(in_features, dtype=torch.int32, device=device).repeat(*leading, 1)
        offsets = buffer(offsets) if kind != "symmetric" else None
        shape = (out_features, in_features)
        layout = {"shape": shape, "group_size": int(group_size), "kind": kind, "scale_dtype": scale_dtype}
        self._hold((buffer(codes), buffer(scales), offsets, perm), layout)

    def _hold(self, arrays, layout):
        self.out_features, self.in_features = layout["shape"]
        self._layout = layout
        self._act_order = arrays[ARRAYS.index("perm")] is not None
        for name, array in zip(ARRAYS, arrays, strict=True):
            self.register_buffer(name, array)

    def get_extra_state(self):
        """What the bytes mean, as a tensor, so that any checkpoint format can hold it."""
        shape, layout = self._layout["shape"], self._layout
        kind, scales = W4_KINDS.index(layout["kind"]), _SCALES.index(layout["scale_dtype"])
        return torch.tensor([_C.w4_layout_version, *shape, layout["group_size"], kind, scales], device="cpu")

    def set_extra_state(self, state):
        op, ours = type(self).__name__, self.get_extra_state().tolist()
        form = f"_extra_state must be {ours} (layout version, out_features, in_features, group_size, kind, scale_dtype)"
        if not isinstance(state, torch.Tensor):
            raise ArgumentTypeError(f"{op}: {form} in a tensor, got {type(state).__name__}")
        if tuple(state.shape) != (len(ours),) or state.is_meta:
            raise ArgumentError(f"{op}: {form}, got {state.dtype} {list(state.shape)} on {state.device.type}")
        theirs = state.tolist()
        if theirs == ours:
            return
        version, n, k, group, kind, scales = theirs
        if kind not in range(len(W4_KINDS)) or scales not in range(len(_SCALES)):
            raise ArgumentError(f"{op}: {form}, got {theirs}")
        raise ArgumentError(
            f"{op}: the checkpoint holds [{n}, {k}] {W4_KINDS[int(kind)]} group_size={group} {_SCALES[int(scales)]} "
            f"scales in layout {version}; this module is {self.extra_repr()}"
        )

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self._check_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _check_state(self, state_dict, prefix):
        """Raises ArgumentError where a state_dict holds a part of a weight, or what torch would convert in the copy.

        Before anything is copied, and for load_state_dict(strict=False) too. A state_dict without any tensor of this
        weight is for other modules.
        """
        op = type(self).__name__
        came = {name: state_dict[prefix + name] for name in (*ARRAYS, _EXTRA_STATE) if prefix + name in state_dict}
        if not came:
            return
        if _EXTRA_STATE in came:
            self.set_extra_state(came[_EXTRA_STATE])  # says best what another layout is
        for name, value in came.items():
            if not isinstance(value, torch.Tensor):
                raise ArgumentTypeError(
                    f"{op}: tensor '{prefix}{name}' must be a torch tensor, got {type(value).__name__}"
                )
        buffers = dict(self.named_buffers(recurse=False))
        expected = {name: buffers[name] for name in ARRAYS if name in buffers}
        expected[_EXTRA_STATE] = self.get_extra_state()
        check_tensors(self, expected, came, lambda name, _: f"{op}: tensor '{prefix}{name}'", lambda dtype: dtype)

    def _held(self):
        """The four arrays. ArgumentError where one was deleted: torch would say that the module has no `weight`."""
        try:
            arrays = self.codes, self.scales, self.offsets, self.perm
        except AttributeError:
            gone = next(name for name in ARRAYS if not hasattr(self, name))
            raise ArgumentError(
                f"{type(self).__name__}: its buffer '{gone}' was deleted; expected {', '.join(ARRAYS)}"
            ) from None
        if (arrays[3] is None) is self._act_order:  # which other arrays there are, the layout says
            made, expected = ("with", "an int32 tensor") if self._act_order else ("without", "None")
            raise ArgumentError(
                f"{type(self).__name__}: its buffer 'perm' must be {expected}, as this module was made {made} "
                f"act-order, got {type(arrays[3]).__name__}"
            )
        return arrays

    def _layout_repr(self):
        layout = self._layout
        return f"{layout['kind']}, group_size={layout['group_size']}, {layout['scale_dtype']} scales"


class PackedLinear(Marked, Packed):
    """What W4Linear and W8Linear share.

    batch_invariant: what w4a16_matmul is given, an attribute to be set; a state_dict does not have it.
    """

    batch_invariant = False

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        *,
        group_size=128,
        kind="symmetric",
        scale_dtype="float16",
        act_order=False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        name = type(self).__name__
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ArgumentTypeError(f"{name}: dtype must be a torch.dtype or None, got {shown(dtype)}")
        device = torch_device(name, device)
        self._allocate(in_features, out_features, group_size, kind, scale_dtype, act_order, device)
        self._hold_bias(torch.zeros(self.out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_weight(cls, weight, bias=None):
        """weight: a W4Weight (of a W8Linear a W8Weight) [out_features, in_features]; its arrays are shared. bias:
        [out_features] or None.
        """
        op, weight_type = f"{cls.__name__}.from_weight", cls.WEIGHT.__name__
        if not isinstance(weight, cls.WEIGHT):
            raise ArgumentTypeError(f"{op}: weight must be a {weight_type}, got {type(weight).__name__}")
        if not (bias is None or isinstance(bias, torch.Tensor)):
            raise ArgumentTypeError(f"{op}: bias must be a torch tensor, got {type(bias).__name__}")
        if bias is not None and tuple(bias.shape) != weight.shape[:1]:
            raise ArgumentError(f"{op}: bias must be [{weight.shape[0]}], got {list(bias.shape)}")
        self = cls.__new__(cls)
        torch.nn.Module.__init__(self)
        self._hold([None if a is None else as_torch(a) for a in weight._arrays], weight.layout)
        self._hold_bias(bias)
        return self

    @classmethod
    def from_linear(cls, linear, *, group_size=128, zeros=None):
        """Rounds an nn.Linear's weight to nearest (`quantize` of the weight's class). The bias is kept as it is."""
        if not isinstance(linear, torch.nn.Linear):
            op = f"{cls.__name__}.from_linear"
            raise ArgumentTypeError(f"{op}: linear must be an nn.Linear, got {type(linear).__name__}")
        weight = cls.WEIGHT.quantize(aligned(linear.weight.detach()), group_size=group_size, zeros=zeros)
        return cls.from_weight(weight, None if linear.bias is None else aligned(linear.bias.detach()))

    def _hold_bias(self, bias):
        self.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias, requires_grad=False))
        self._weight = None

    @property
    def weight(self):
        """The weight, a W4Weight or W8Weight, over this module's buffers."""
        codes, scales, offsets, perm = arrays = self._held()
        w = self._weight
        old = (None,) * 4 if w is None else w._arrays
        if old[0] is not codes or old[1] is not scales or old[2] is not offsets or old[3] is not perm:
            w = self.WEIGHT._of_module(arrays, self._layout)
            if not compiling():
                self._weight = w
        return w

    def _apply(self, fn, recurse=True):
        self._weight = None  # so that arrays which are replaced are freed
        return super()._apply(fn, recurse)

    def __getstate__(self):
        state = self.__dict__.copy()
        state["_weight"] = None
        return state

    def extra_repr(self):
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self._layout_repr()}"
        )


class W4Linear(PackedLinear):
    """y = x W^T + bias with W in 4 bits: nn.Linear for inference.

    x: [..., in_features], float32 (CPU), float16 or bfloat16; y the same with out_features last. The packed weight
    is held in uint8 buffers (`codes`, `scales`, `offsets`, and `perm`), which .to(dtype) leaves alone; `bias` is a
    frozen parameter in x's dtype. With `batch_invariant = True` set on it, a row's bits are the same at every number of
    rows. Make one with `from_weight` or `from_linear`, or empty (to be filled by
    load_state_dict) with the constructor, on any torch device, "meta" included.
    """

    WEIGHT = W4Weight

    def forward(self, x):
        return w4a16_matmul(x, self.weight, bias=self.bias, batch_invariant=self.batch_invariant)


class W8Linear(PackedLinear):
    """y = x W^T + bias with W in 8 bits, kind "symmetric" or "integer": a W4Linear otherwise."""

    WEIGHT = W8Weight

    def forward(self, x):
        return w8a16_matmul(x, self.weight, bias=self.bias, batch_invariant=self.batch_invariant)


LINEARS = {linear.WEIGHT.BITS: linear for linear in (W4Linear, W8Linear)}


def linear_of(weight):
    """The W4Linear or W8Linear over a weight's arrays, without bias."""
    return LINEARS[weight.BITS].from_weight(weight)
