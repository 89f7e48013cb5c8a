# SPDX-License-Identifier: Apache-2.0
"""The decode step of a model of transformers as a list of our ops, recorded once and run in one call.

A step of one new token a row is the same ops on buffers of the same shapes every time. transformers' forward takes
longer to find out which they are than a small model takes to compute them. A StepProgram holds the ops with their
arguments, as bindings take them. What changes from step to step lies in arrays; each step gets its rotation, its caches
and its logits anew. On the CPU the list runs as it is, on a GPU as a CUDA graph of it (step_graph.py).
"""

import functools
import inspect
import operator

import torch
import torch.nn.modules.module as _modules
from transformers.activations import ACT2FN

from rooftile import _C
from rooftile._arrays import workspace
from rooftile._calls import ran
from rooftile.errors import NotSupportedError
from rooftile.gemm import ARRAYS
from rooftile.integrations.step_products import Product, joined
from rooftile.nn import PackedLinear

# Families of transformers whose layers are the same but for what the layers themselves say: biases, norms of q and k,
# windows, the activation.
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_GATED = {"silu": "silu_mul", "swish": "silu_mul", "gelu": "gelu_mul"} | dict.fromkeys(
    ("gelu_pytorch_tanh", "gelu_new"), "gelu_tanh_mul"
)
# rotary tables of these kinds depend on more than the position: on how long the text has become
_ROPE_BY_LENGTH = ("dynamic", "longrope")
_form, _stride, _place = operator.attrgetter("shape", "dtype"), torch.Tensor.stride, torch.Tensor.data_ptr
_call = functools.partial.__call__


class StepProgram:
    """One decode step of `model` with `batch` rows.

    Raises NotSupportedError, which begins with "model: ", for models that have no such program.
    """

    def __init__(self, model, batch):
        self._checks = []  # (dict, key, the object that is there): what was recorded
        self._classes = []  # (module, its class)
        self._methods = []  # (class, its forward)
        self._tensors = []  # those that ops read
        # dicts without hooks of users: of all modules, then of each child
        self._hooks = [_modules._global_forward_hooks, _modules._global_forward_pre_hooks]
        self.batch = batch
        self.stream = None  # of a GPU, on which the latest step was queued
        with torch.inference_mode(False):  # so that steps in and out of it may write the buffers
            self._record(model)
        self._seen = tuple(zip(*self._checks, strict=True))
        self._children, self._kinds = zip(*self._classes, strict=True)
        self._forms, self._strides, self._places = (list(map(of, self._tensors)) for of in (_form, _stride, _place))

    def in_place(self):
        """Whether the tensors that ops read are where they were."""
        return list(map(_place, self._tensors)) == self._places

    def still_valid(self):
        """Whether modules, tensors, settings and classes are those that were recorded, and there are no hooks."""
        there, keys, seen = self._seen
        return (
            all(map(operator.is_, map(dict.get, there, keys), seen))
            and all(map(operator.is_, map(type, self._children), self._kinds))
            and self.in_place()
            and list(map(_form, self._tensors)) == self._forms
            and list(map(_stride, self._tensors)) == self._strides
            and all(kind.forward is forward for kind, forward in self._methods)
            and not (any(self._hooks) and any(map(_hooked, self._hooks)))
        )

    # ---- recording ----

    def _record(self, model):
        family = type(model).__name__.removesuffix("ForCausalLM")
        config = model.config
        if family not in FAMILIES or not type(model).__module__.startswith("transformers.models."):
            known = ", ".join(f"{name}ForCausalLM" for name in FAMILIES)
            raise NotSupportedError(f"model: no step program for {type(model).__name__}; there is one for {known}")
        if any(map(_hooked, self._hooks)):
            raise NotSupportedError("model: no step program, because torch has forward hooks of all modules")
        self._family, self._module = family, inspect.getmodule(type(model))
        self._of_class(type(model))
        self._classes.append((model, type(model)))
        decoder = self._child(model, "model", "Model")
        embedding = self._child(decoder, "embed_tokens", torch.nn.Embedding)
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
        layers = self._child(decoder, "layers", torch.nn.ModuleList)
        count = self._value(config, "num_hidden_layers")
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads

        def buffer(*shape):
            return torch.empty(self.batch, *shape, dtype=dtype, device=self.device)

        self.x, self._normed = buffer(config.hidden_size), buffer(config.hidden_size)
        self._qkv, self._attended = buffer((heads + 2 * kv_heads) * head_dim), buffer(1, heads, head_dim)
        q, k, v = self._qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 1)
        self._q, self._k, self._v = (t.view(self.batch, 1, -1, head_dim) for t in (q, k, v))
        self._gate_up, self._h = buffer(2 * config.intermediate_size), buffer(config.intermediate_size)
        self._rotary = self._child(decoder, "rotary_emb", "RotaryEmbedding")
        # of every layer: calls before its cache's, (window, scale), calls behind them
        self._recorded = [self._layer(self._child(layers, str(i), "DecoderLayer"), config) for i in range(count)]
        self._last = [self._norm(self._child(decoder, "norm", "RMSNorm"), self.x, self._normed)]
        head = self._child(model, "lm_head", None)
        self.vocabulary = head.out_features if isinstance(head, PackedLinear) else len(self._tensor(head, "weight"))
        self._head = self._layer_of(head, self.vocabulary, config.hidden_size)

    def _of_class(self, kind):
        """Notes the forward of a class, which is transformers' or torch's own."""
        if (kind, kind.forward) not in self._methods:
            if kind.forward.__module__ != kind.__module__:
                raise NotSupportedError(f"model: no step program, because {kind.__name__}.forward was replaced")
            self._methods.append((kind, kind.forward))

    def _child(self, parent, name, kind):
        """A module, which is exactly of its kind: a subclass may do something else. kind: a class, what a class of the
        family is called behind its name, or None for any."""
        child = parent._modules.get(name)
        if isinstance(kind, str):
            kind = getattr(self._module, self._family + kind)
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
            if name == "weight":
                raise NotSupportedError(f"model: no step program of a {type(module).__name__} whose weight is computed")
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

    def _layer_of(self, linear, outputs, inputs):
        """The Product of a layer whose weight is [outputs, inputs]."""
        bias = self._tensor(linear, "bias")
        self._has_shape(linear, None if bias is None else bias.shape, outputs)
        product = Product.of(linear)
        if product.packed:
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
        """Of layers that read the same x: (the Products, all of them as one Product or None).

        outputs: {name: N}.
        """
        layers = [self._layer_of(self._child(parent, name, None), n, x.shape[1]) for name, n in outputs.items()]
        return layers, joined(layers)

    @staticmethod
    def _has_shape(module, there, *shape):
        if there is not None and tuple(there) != shape:
            raise NotSupportedError(
                f"model: no step program, because a {type(module).__name__} is {list(there)} where the config says "
                f"{list(shape)}"
            )

    def _norm(self, norm, x, out):
        weight, eps = self._tensor(norm, "weight"), self._value(norm, "variance_epsilon")
        self._has_shape(norm, weight.shape, x.shape[-1])
        return functools.partial(_C.rms_norm, x, weight, eps, out, None, None)

    def _layer(self, layer, config):
        attention, mlp = self._child(layer, "self_attn", "Attention"), self._child(layer, "mlp", "MLP")
        before = [self._norm(self._child(layer, "input_layernorm", "RMSNorm"), self.x, self._normed)]
        parts = {"q_proj": self._q, "k_proj": self._k, "v_proj": self._v}
        parts = {name: part.view(self.batch, -1) for name, part in parts.items()}
        layers, together = self._products(
            attention, {name: part.shape[1] for name, part in parts.items()}, self._normed
        )
        if together is None:
            before += [one(self._normed, part) for one, part in zip(layers, parts.values(), strict=True)]
        else:
            before.append(together(self._normed, self._qkv))
        if self._family == "Qwen3":
            for name, heads in (("q_norm", self._q), ("k_norm", self._k)):
                before.append(self._norm(self._child(attention, name, "RMSNorm"), heads, heads))
        attended = self._attended.view(self.batch, -1)
        behind = [self._product(attention, "o_proj", attended, self.x, residual=self.x)]
        norm = self._child(layer, "post_attention_layernorm", "RMSNorm")
        behind.append(self._norm(norm, self.x, self._normed))
        behind += self._gated(mlp, config)
        behind.append(self._product(mlp, "down_proj", self._h, self.x, residual=self.x))
        windowed = config if type(attention).__name__ == "MistralAttention" else attention
        return before, (self._value(windowed, "sliding_window"), self._value(attention, "scaling")), behind

    def _gated(self, mlp, config):
        """Calls of h = activation(gate) * up."""
        activation, module = config.hidden_act, self._child(mlp, "act_fn", None)
        if type(module) is not type(ACT2FN[activation]):
            raise NotSupportedError(
                f"model: no step program, because act_fn is a {type(module).__name__}, the config says {activation!r}"
            )
        if activation not in _GATED:
            raise NotSupportedError(f"model: no step program with the activation {activation!r}")
        inner = config.intermediate_size
        layers, together = self._products(mlp, {"gate_proj": inner, "up_proj": inner}, self._normed)
        if together is not None and together.packed:
            return [together(self._normed, self._h, activation=_GATED[activation])]
        if together is not None:
            calls = [together(self._normed, self._gate_up)]
        else:
            halves = self._gate_up[:, :inner], self._gate_up[:, inner:]
            calls = [one(self._normed, half) for one, half in zip(layers, halves, strict=True)]
        if _GATED[activation] == "silu_mul":
            return [*calls, functools.partial(_C.silu_mul, self._gate_up, self._h, None, None)]
        approximate = "none" if activation == "gelu" else "tanh"
        return [*calls, functools.partial(_C.gelu_mul, self._gate_up, approximate, self._h, None, None)]

    # ---- running ----

    @property
    def windows(self):
        """Of every layer: tokens that a query looks back, or None."""
        return [window for _, (window, _), _ in self._recorded]

    @property
    def new_key(self):
        """Has the shape of a layer's new keys, as transformers counts them: [batch, kv_heads, 1, head_dim]."""
        return self._k.transpose(1, 2)

    @property
    def table_of_positions(self):
        """Whether the rotation of a token depends on its position alone, so that it can be looked up."""
        kind = getattr(self._rotary, "rope_type", "default")
        return not any(name in kind for name in _ROPE_BY_LENGTH)

    def rotation(self, x, positions):
        """cos, sin [n, head_dim / 2] of positions [n], as the model's own module says: its settings may change, and it
        may count.

        x: what the module takes the dtype and device from.
        """
        cos, sin = self._rotary(x, positions[:, None].long())
        return tuple(t[:, 0, : t.shape[-1] // 2] for t in (cos, sin))

    def calls(self, cos, sin, positions, caches, logits):
        """The step as functools.partials, in order: from x, the new tokens' embeddings, to logits.

        cos, sin [n, head_dim / 2], positions int32 [batch, 1]: the rotation of the new tokens. caches: one a layer, as
        bindings take them. logits: [batch, 1, vocabulary].
        """
        calls, q, k, v, out = [], self._q, self._k, self._v, self._attended
        for (before, (window, scale), behind), cache in zip(self._recorded, caches, strict=True):
            calls += before
            rope = (q, k, v, cos, sin, positions, cache, None, None, q, None, None)
            attend = (q, cache, out, None, None, None, scale, window, None, None, workspace, None, None)
            calls += functools.partial(_C.rope_append, *rope), functools.partial(_C.decode_attention, *attend)
            calls += behind
        calls += self._last
        calls.append(self._head(self._normed[:, None], logits))
        return calls

    def new_logits(self):
        return torch.empty(self.batch, 1, self.vocabulary, dtype=self.dtype, device=self.device)

    def embed(self, ids):
        """[batch, hidden_size] of the new tokens, ids int64 [batch, 1]."""
        return torch.nn.functional.embedding(ids, self.embedding)[:, 0]

    def run(self, x, caches, lengths):
        """On the CPU: logits [batch, 1, vocabulary] of one token a row, x as of embed(), which every cache then holds.

        caches: one a layer, as bindings take them, each with `lengths` (int32 [batch]) tokens and room for one more.
        """
        cos, sin = self.rotation(x[:, None], lengths)
        rows = torch.arange(self.batch, dtype=torch.int32, device=x.device)[:, None]
        logits = self.new_logits()
        calls = [functools.partial(torch.Tensor.copy_, self.x, x)]
        calls += self.calls(cos, sin, rows, caches, logits)
        _, *kernels = map(_call, calls)  # in C: no signal handler comes between two ops
        ran(*kernels)
        return logits


def _hooked(hooks):
    """Whether a module's dict of hooks has any but those of transformers, which wait until outputs are asked for."""
    return any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks.values())
