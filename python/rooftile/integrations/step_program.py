# SPDX-License-Identifier: Apache-2.0
"""The decode step of a model of transformers as a list of our ops, recorded once and run in one call.

A step of one new token a row is the same ops on buffers of the same shapes every time. transformers' forward takes
longer to find out which they are than a small model takes to compute them. A StepProgram holds the ops with their
arguments, as bindings take them. What changes from step to step lies in arrays; each step gets its rotation, its caches
and its logits anew. On the CPU bindings keep the list with its arguments (step_calls.py), on a GPU it becomes a CUDA
graph (step_graph.py).
"""

import dataclasses
import functools
import inspect
import operator

import torch
import torch.nn.modules.module as _modules
from transformers.activations import ACT2FN

from rooftile import _C
from rooftile.errors import NotSupportedError
from rooftile.gemm import ARRAYS
from rooftile.integrations._models import head_dim as head_dim_of
from rooftile.integrations.step_products import KeptWorkspace, Product, joined
from rooftile.nn import PackedLinear


@dataclasses.dataclass(frozen=True)
class Family:
    """How the layers of a family of transformers differ from Llama's, but for what they say themselves (biases,
    windows, the activation).
    """

    qkv: tuple = ("q_proj", "k_proj", "v_proj")  # or one layer for all three
    gate_up: tuple = ("gate_proj", "up_proj")  # or one layer for both
    activation: str = "act_fn"
    dropouts: tuple = ()  # of a decoder layer
    qk_norm: str | None = None  # RMS norms of q and k: "head", of each head; "row", of all heads of a token together
    # the norms of what attention is given and returns, then of what the MLP is given and returns
    norms: tuple = ("input_layernorm", None, "post_attention_layernorm", None)
    norm_offset: float = 0.0  # added to the weights of norms
    norm_eps: str = "variance_epsilon"
    window_of_config: bool = False  # attention asks the config for its window, not itself
    softcap: str | None = None  # of attention's logits
    multipliers: bool = False  # of the embedding, of what is added to the residual, and of the logits
    decoder: str = "Model"
    scaled_embedding: bool = False
    capped_logits: bool = False
    config_activation: str = "hidden_act"


_GEMMA = Family(norm_offset=1.0, norm_eps="eps", scaled_embedding=True)
_GEMMA2 = dataclasses.replace(
    _GEMMA,
    norms=(
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    softcap="attn_logit_softcapping",
    capped_logits=True,
    config_activation="hidden_activation",
)
FAMILIES = {
    "Llama": Family(),
    "Mistral": Family(window_of_config=True),
    "Qwen2": Family(),
    "Qwen3": Family(qk_norm="head"),
    "Phi3": Family(
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
        activation="activation_fn",
        dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
        window_of_config=True,
    ),
    "Olmo2": Family(qk_norm="row", norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm")),
    "Granite": Family(multipliers=True),
    "Gemma": _GEMMA,
    "Gemma2": _GEMMA2,
    "Gemma3": dataclasses.replace(_GEMMA2, qk_norm="head", softcap=None, decoder="TextModel"),
}
_GATED = {"silu": "silu_mul", "swish": "silu_mul", "gelu": "gelu_mul"} | dict.fromkeys(
    ("gelu_pytorch_tanh", "gelu_new"), "gelu_tanh_mul"
)
# rotary tables of these kinds depend on more than the position: on how long the text has become
_ROPE_BY_LENGTH = ("dynamic", "longrope")
_form, _stride, _place = operator.attrgetter("shape", "dtype"), torch.Tensor.stride, torch.Tensor.data_ptr
_version = operator.attrgetter("_version")
_call = functools.partial.__call__


def run_calls(calls):
    """Makes the calls of a step, functools.partials of functions in C: no signal handler comes between two of them.
    Returns the names of our kernels.
    """
    return [name for name in list(map(_call, calls)) if type(name) is str]


def _join_sum(calls, follows):
    """Makes the last of `calls`, where it is a sum, one call with the norm of it that `follows` begins with:
    add_rms_norm rounds the sum as add_ does.
    """
    if not follows or calls[-1].func is not torch.Tensor.add_ or follows[0].func is not _C.rms_norm:
        return
    total, part = calls[-1].args
    x, weight, eps, offset, out, *context = follows[0].args
    if x is total and out is part:
        del calls[-1]
        follows[0] = functools.partial(_C.add_rms_norm, part, total, weight, eps, offset, out, total, *context)


def _join_heads(norms):
    """The norms of q and of k as one call, where they are of heads and differ in nothing but the weight."""
    if len(norms) < 2 or norms[0].args[0].shape[-1] != norms[1].args[0].shape[-1]:
        return norms
    (q, q_weight, *same, q_out, stream, plan), (k, k_weight, *same_of_k, k_out, _, _) = (norm.args for norm in norms)
    if same != same_of_k or q.shape[-1] > _C.max_head_norm:
        return norms
    return [functools.partial(_C.qk_rms_norm, q, k, q_weight, k_weight, *same, q_out, k_out, stream, plan)]


class StepProgram:
    """One decode step of `model` with `batch` rows. cuda_graphs: whether on a GPU it becomes a CUDA graph.

    Raises NotSupportedError, which begins with "model: ", for models that have no such program.
    """

    def __init__(self, model, batch, cuda_graphs=True):
        self._checks = []  # (dict, key, the object that is there): what was recorded
        self._classes = []  # (module, its class)
        self._methods = []  # (class, name of a method, the method)
        self._tensors = []  # those that ops read
        self._looked_up = []  # those that made the table of rotations
        # dicts without hooks of users: of all modules, then of each child
        self._hooks = [_modules._global_forward_hooks, _modules._global_forward_pre_hooks]
        self.batch, self.cuda_graphs = batch, cuda_graphs
        self.stream = None  # of a GPU, on which the latest step was queued
        self._table = None  # of rotation_table()
        self._workspace = KeptWorkspace()
        with torch.inference_mode(False):  # so that steps in and out of it may write the buffers
            self._record(model)
        self._seen = tuple(zip(*self._checks, strict=True))
        self._versions = list(map(_version, self._looked_up))
        self._children, self._kinds = zip(*self._classes, strict=True)
        self._forms, self._strides, self._places = (list(map(of, self._tensors)) for of in (_form, _stride, _place))

    def in_place(self):
        """Whether the tensors that ops read are where they were."""
        return list(map(_place, self._tensors)) == self._places

    def still_valid(self):
        """Whether modules, tensors, settings and classes are those that were recorded, and there are no hooks. What a
        table of rotations was made from may not have been written since.
        """
        there, keys, seen = self._seen
        return (
            all(map(operator.is_, map(dict.get, there, keys), seen))
            and all(map(operator.is_, map(type, self._children), self._kinds))
            and self.in_place()
            and list(map(_form, self._tensors)) == self._forms
            and list(map(_stride, self._tensors)) == self._strides
            and list(map(_version, self._looked_up)) == self._versions
            and all(getattr(kind, name) is method for kind, name, method in self._methods)
            and (self._layer_types and list(self._layer_types)) == self._types_seen
            and not (any(self._hooks) and any(map(_hooked, self._hooks)))
        )

    # ---- recording ----

    def _record(self, model):
        name = type(model).__name__.removesuffix("ForCausalLM")
        config = model.config
        if name not in FAMILIES or not type(model).__module__.startswith("transformers.models."):
            known = ", ".join(f"{name}ForCausalLM" for name in FAMILIES)
            raise NotSupportedError(f"model: no step program for {type(model).__name__}; there is one for {known}")
        if any(map(_hooked, self._hooks)):
            raise NotSupportedError("model: no step program, because torch has forward hooks of all modules")
        self.family, self._name, self._module = FAMILIES[name], name, inspect.getmodule(type(model))
        self._of_class(type(model))
        self._classes.append((model, type(model)))
        decoder = self._child(model, "model", self.family.decoder)
        for module in (model, decoder):
            self._value(module, "config")
        scaled = self.family.scaled_embedding
        embedding = self._child(decoder, "embed_tokens", "TextScaledWordEmbedding" if scaled else torch.nn.Embedding)
        if self._value(embedding, "max_norm") is not None:
            raise NotSupportedError("model: no step program with an embedding that renormalises (max_norm)")
        weight = embedding._parameters.get("weight")
        self.dtype, self.device = dtype, device = getattr(weight, "dtype", None), getattr(weight, "device", None)
        self.embedding = self._tensor(embedding, "weight")
        if device.type not in ("cpu", "cuda"):
            raise NotSupportedError(f"model: a step program runs on the CPU or on a GPU, got {device}")
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise NotSupportedError(f"model: a step program is of float32, float16 or bfloat16, got {dtype}")
        if device.type == "cuda" and dtype == torch.float32:
            raise NotSupportedError(f"model: a step program on a GPU is of float16 or bfloat16, got {dtype}")
        if self._value(config, "use_bidirectional_attention"):
            raise NotSupportedError("model: no step program with attention in both directions")
        layers = self._child(decoder, "layers", torch.nn.ModuleList)
        count = self._value(config, "num_hidden_layers")
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = head_dim_of(config)

        def buffer(*shape):
            return torch.empty(self.batch, *shape, dtype=dtype, device=self.device)

        self.x, self._normed = buffer(config.hidden_size), buffer(config.hidden_size)
        self._qkv, self._attended = buffer((heads + 2 * kv_heads) * head_dim), buffer(1, heads, head_dim)
        q, k, v = self._qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 1)
        self._q, self._k, self._v = (t.view(self.batch, 1, -1, head_dim) for t in (q, k, v))
        self._gate_up, self._h = buffer(2 * config.intermediate_size), buffer(config.intermediate_size)
        self._rotary = self._child(decoder, "rotary_emb", "RotaryEmbedding")
        if self.table_of_positions:
            self._rotation_settings()
        scales = self.family.multipliers
        self._embedding_scale = self._value(decoder, "embedding_multiplier") if scales else 1
        if scaled:  # read where it lies
            self._embedding_scale = self._tensor(embedding, "embed_scale", embedding._buffers)
            if self._embedding_scale.dtype != dtype:
                kind = self._embedding_scale.dtype
                raise NotSupportedError(f"model: no step program with an embed_scale of {kind} for weights of {dtype}")
        self._logits_scale = self._value(config, "logits_scaling") if scales else 1
        self._logits_cap = self._value(config, "final_logit_softcapping") if self.family.capped_logits else None
        types = self._value(self._rotary, "layer_types")  # where layers of different types have rotations of their own
        self._rotations = [None] if types is None else list(types)
        self._layer_types = self._value(config, "layer_types")  # whose masks are the config's, at each forward
        self._types_seen = self._layer_types and list(self._layer_types)
        # of every layer: calls before its cache's, (window, scale, softcap, which rotation), calls behind them
        self._recorded = [self._layer(i, self._child(layers, str(i), "DecoderLayer"), config) for i in range(count)]
        self._last = [self._norm(self._child(decoder, "norm", "RMSNorm"), self.x, self._normed)]
        norms = [before for before, *_ in self._recorded[1:]] + [self._last]
        for (*_, behind), follows in zip(self._recorded, norms, strict=False):
            _join_sum(behind, follows)
        head = self._child(model, "lm_head", None)
        self.vocabulary = head.out_features if isinstance(head, PackedLinear) else len(self._tensor(head, "weight"))
        self._head = self._layer_of(head, self.vocabulary, config.hidden_size)

    def _of_class(self, kind):
        """Notes the forward of a class, which is transformers' or torch's own."""
        for name in ("forward", "_norm"):  # what Gemma's norms compute is in the latter
            method = getattr(kind, name, None)
            if method is not None and (kind, name, method) not in self._methods:
                if method.__module__ != kind.__module__:
                    raise NotSupportedError(f"model: no step program, because {kind.__name__}.{name} was replaced")
                self._methods.append((kind, name, method))

    def _child(self, parent, name, kind):
        """A module, which is exactly of its kind: a subclass may do something else. kind: a class, what a class of the
        family is called behind its name, or None for any."""
        child = parent._modules.get(name)
        if isinstance(kind, str):
            kind = getattr(self._module, self._name + kind)
            if kind.__module__ != self._module.__name__:
                raise NotSupportedError(f"model: no step program, because {kind.__name__} of transformers was replaced")
        if kind is not None:
            if type(child) is not kind:
                raise NotSupportedError(
                    f"model: no step program, because {name} is a {type(child).__name__}, expected a {kind.__name__}"
                )
            if kind is not torch.nn.ModuleList:  # which has none
                self._of_class(kind)
        if self._value(child, "forward") is not None:
            raise NotSupportedError(f"model: no step program, because {name} has a forward of its own")
        self._checks.append((parent._modules, name, child))
        self._classes.append((child, type(child)))
        self._hooks += child._forward_hooks, child._forward_pre_hooks
        if any(map(_hooked, self._hooks[-2:])):
            raise NotSupportedError(f"model: no step program, because {name} has forward hooks")
        return child

    def _tensor(self, module, name, there=None):
        """A tensor of a module, or None. there: the dict that has it, default the module's parameters."""
        packed = there is not None
        there = module._parameters if there is None else there
        tensor = there.get(name)
        self._checks.append((there, name, tensor))
        if tensor is None:
            if name in ("weight", "embed_scale"):
                raise NotSupportedError(f"model: no step program of a {type(module).__name__} whose {name} is computed")
            return None
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided:
            raise NotSupportedError(
                f"model: no step program of weights that are a {type(tensor).__name__} ({tensor.layout})"
            )
        if tensor.device != self.device:
            raise NotSupportedError(
                f"model: no step program of several devices: the embedding is on {self.device}, a {name} on "
                f"{tensor.device}"
            )
        if not packed and tensor.dtype != self.dtype:
            raise NotSupportedError(
                f"model: no step program of several dtypes: the embedding is {self.dtype}, a {name} is {tensor.dtype}"
            )
        self._tensors.append(tensor)
        return tensor

    def _value(self, module, name):
        """An attribute that the step depends on, or None."""
        value = vars(module).get(name)
        self._checks.append((vars(module), name, value))
        return value

    def _rotation_settings(self):
        """Notes what the rotary module's tables follow from, which steps look up."""
        module = self._rotary
        for name in vars(module).keys() - vars(torch.nn.Module()).keys():
            self._value(module, name)
        for name, buffer in module._buffers.items():
            self._checks.append((module._buffers, name, buffer))
            if buffer is not None and not buffer.is_inference():  # whose writes torch does not count
                self._looked_up.append(buffer)

    def _layer_of(self, linear, outputs, inputs):
        """The Product of a layer whose weight is [outputs, inputs]."""
        bias = self._tensor(linear, "bias")
        self._has_shape(linear, None if bias is None else bias.shape, outputs)
        product = Product.of(linear, workspace=self._workspace)
        if product.packed:
            self._value(linear, "batch_invariant")
            for name in ARRAYS:
                self._tensor(linear, name, linear._buffers)
            self._has_shape(linear, product.weight.shape, outputs, inputs)
        else:
            self._of_class(torch.nn.Linear)
            self._has_shape(linear, self._tensor(linear, "weight").shape, outputs, inputs)
        return product

    def _product(self, parent, name, x, out, residual=None):
        layer = self._layer_of(self._child(parent, name, None), out.shape[1], x.shape[1])
        return layer(x, out, residual=residual)

    def _products(self, parent, outputs, x):
        """Of layers that read the same x: (the Products, all of them as one Product or None). One layer is both.

        outputs: {name: N}.
        """
        layers = [self._layer_of(self._child(parent, name, None), n, x.shape[1]) for name, n in outputs.items()]
        return layers, layers[0] if len(layers) == 1 else joined(layers)

    @staticmethod
    def _has_shape(module, there, *shape):
        if there is not None and tuple(there) != shape:
            raise NotSupportedError(
                f"model: no step program, because a {type(module).__name__} is {list(there)} where the config says "
                f"{list(shape)}"
            )

    def _norm(self, norm, x, out):
        weight, eps = self._tensor(norm, "weight"), self._value(norm, self.family.norm_eps)
        self._has_shape(norm, weight.shape, x.shape[-1])
        return functools.partial(_C.rms_norm, x, weight, eps, self.family.norm_offset, out, None, None)

    @staticmethod
    def _has_value(name, there, of_config):
        if there != of_config:
            raise NotSupportedError(
                f"model: no step program, because a layer's {name} is {there!r} where the config says {of_config!r}"
            )

    def _layer(self, index, layer, config):
        family, attention, mlp = (
            self.family,
            self._child(layer, "self_attn", "Attention"),
            self._child(layer, "mlp", "MLP"),
        )
        for name in family.dropouts:
            if self._value(self._child(layer, name, torch.nn.Dropout), "training"):
                raise NotSupportedError(f"model: no step program, because {name} is in training mode")
        norms = [name and self._child(layer, name, "RMSNorm") for name in family.norms]
        before, x = self._given(norms[0])
        parts = [part.view(self.batch, -1) for part in (self._q, self._k, self._v)]
        widths = [self._qkv.shape[1]] if len(family.qkv) == 1 else [part.shape[1] for part in parts]
        layers, together = self._products(attention, dict(zip(family.qkv, widths, strict=True)), x)
        if together is None:
            before += [one(x, part) for one, part in zip(layers, parts, strict=True)]
        else:
            before.append(together(x, self._qkv))
        normed = {"head": (self._q, self._k), "row": parts[:2]}.get(family.qk_norm, ())
        norms_of = zip(("q_norm", "k_norm"), normed, strict=False)
        before += _join_heads(
            [self._norm(self._child(attention, name, "RMSNorm"), heads, heads) for name, heads in norms_of]
        )
        scale = self._value(layer, "residual_multiplier") if family.multipliers else 1
        behind = self._added(attention, "o_proj", self._attended.view(self.batch, -1), norms[1], scale)
        calls, x = self._given(norms[2])
        _join_sum(behind, calls)
        behind += calls + self._gated(mlp, config, x)
        behind += self._added(mlp, "down_proj", self._h, norms[3], scale)
        kind = self._types_seen[index] if self._types_seen else None
        window = self._value(config, "sliding_window") if family.window_of_config else None
        if kind is not None and not family.window_of_config:
            # the masks of transformers follow the config, attention itself what it was made with
            window, of_config = self._value(attention, "sliding_window"), self._value(config, "sliding_window")
            self._has_value("sliding_window", window, of_config if kind == "sliding_attention" else None)
            self._has_value("layer_type", self._value(attention, "layer_type") or kind, kind)
        softcap = None if family.softcap is None else self._value(attention, family.softcap)
        rotation = 0 if len(self._rotations) == 1 else self._rotations.index(kind)
        return before, (window, self._value(attention, "scaling"), softcap, rotation), behind

    def _given(self, norm):
        """(calls, what attention or the MLP is given then): x, normed if there is a norm."""
        return ([], self.x) if norm is None else ([self._norm(norm, self.x, self._normed)], self._normed)

    def _added(self, parent, name, x, norm, scale):
        """Calls of self.x += scale * norm(the layer's product with x), without the norm where there is none."""
        if norm is None and scale == 1:
            return [self._product(parent, name, x, self.x, residual=self.x)]
        calls = [self._product(parent, name, x, self._normed)]
        if norm is not None:
            calls.append(self._norm(norm, self._normed, self._normed))
        if scale != 1:
            calls.append(functools.partial(torch.Tensor.mul_, self._normed, scale))
        return [*calls, functools.partial(torch.Tensor.add_, self.x, self._normed)]

    def _gated(self, mlp, config, x):
        """Calls of h = activation(gate) * up, of what the MLP is given."""
        name, activation = self.family.activation, getattr(config, self.family.config_activation)
        module = self._child(mlp, name, None)
        if type(module) is not type(ACT2FN[activation]):
            raise NotSupportedError(
                f"model: no step program, because {name} is a {type(module).__name__}, the config says {activation!r}"
            )
        if activation not in _GATED:
            raise NotSupportedError(f"model: no step program with the activation {activation!r}")
        inner = config.intermediate_size
        width = 2 * inner // len(self.family.gate_up)
        layers, together = self._products(mlp, dict.fromkeys(self.family.gate_up, width), x)
        if together is not None and together.packed:
            return [together(x, self._h, activation=_GATED[activation])]
        if together is not None:
            calls = [together(x, self._gate_up)]
        else:
            halves = self._gate_up[:, :inner], self._gate_up[:, inner:]
            calls = [one(x, half) for one, half in zip(layers, halves, strict=True)]
        if _GATED[activation] == "silu_mul":
            return [*calls, functools.partial(_C.silu_mul, self._gate_up, self._h, None, None)]
        approximate = "none" if activation == "gelu" else "tanh"
        return [*calls, functools.partial(_C.gelu_mul, self._gate_up, approximate, self._h, None, None)]

    # ---- running ----

    @property
    def windows(self):
        """Of every layer: tokens that a query looks back, or None."""
        return [window for _, (window, *_), _ in self._recorded]

    @property
    def new_key(self):
        """Has the shape of a layer's new keys, as transformers counts them: [batch, kv_heads, 1, head_dim]."""
        return self._k.transpose(1, 2)

    @property
    def table_of_positions(self):
        """Whether the rotation of a token depends on its position alone, so that it can be looked up."""
        kinds = getattr(self._rotary, "rope_type", "default")  # of transformers, or a dict of them by types of layers
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        return not any(name in kind for kind in kinds for name in _ROPE_BY_LENGTH)

    def rotation(self, x, positions):
        """cos, sin [n, R], R <= head_dim / 2, of positions [n], as the model's own module computes them. Where layers
        of different types have their own, cos and sin of each type.

        x: what the module takes the dtype and device from.
        """
        at = positions[:, None].long()
        tables = [self._rotary(x, at) if kind is None else self._rotary(x, at, kind) for kind in self._rotations]
        return [t[:, 0, : t.shape[-1] // 2] for pair in tables for t in pair]

    def rotation_table(self, positions):
        """rotation() of positions 0 to `positions` - 1, at least; for programs with table_of_positions."""
        if self._table is None or len(self._table[0]) < positions:
            self._table = self.rotation(self.x, torch.arange(positions, device=self.device))
        return self._table

    def calls(self, rotation, positions, caches, logits):
        """The step as functools.partials, in order: from x, the new tokens' embeddings, to logits.

        rotation: tables as of rotation(), positions int32 [batch, 1]: the rows of the new tokens in them. caches: one
        a layer, as bindings take them. logits: [batch, 1, vocabulary].
        """
        calls, q, k, v, out = [], self._q, self._k, self._v, self._attended
        if isinstance(self._embedding_scale, torch.Tensor) or self._embedding_scale != 1:
            calls.append(functools.partial(torch.Tensor.mul_, self.x, self._embedding_scale))
        for (before, (window, scale, softcap, which), behind), cache in zip(self._recorded, caches, strict=True):
            calls += before
            cos, sin = rotation[2 * which : 2 * which + 2]
            rope = (q, k, v, cos, sin, positions, cache, None, None, q, None, None)
            attend = (q, cache, out, None, None, None, scale, window, softcap, None, self._workspace, None, None)
            calls += functools.partial(_C.rope_append, *rope), functools.partial(_C.decode_attention, *attend)
            calls += behind
        calls += self._last
        calls.append(self._head(self._normed[:, None], logits))
        if self._logits_scale != 1:
            calls.append(functools.partial(torch.Tensor.div_, logits, self._logits_scale))
        if self._logits_cap is not None:
            calls += (
                functools.partial(torch.Tensor.div_, logits, self._logits_cap),
                functools.partial(torch.Tensor.tanh_, logits),
                functools.partial(torch.Tensor.mul_, logits, self._logits_cap),
            )
        return calls

    def new_logits(self):
        return torch.empty(self.batch, 1, self.vocabulary, dtype=self.dtype, device=self.device)

    def embed(self, ids):
        """[batch, hidden_size] of the new tokens, ids int64 [batch, 1]."""
        return torch.nn.functional.embedding(ids, self.embedding)[:, 0]


def _hooked(hooks):
    """Whether a module's dict of hooks has any but those of transformers, which wait until outputs are asked for."""
    return any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks.values())
