# SPDX-License-Identifier: Apache-2.0
"""The decode step of a model of transformers as a list of our ops, recorded once and run in one call.

A step of one new token a row is the same ops on buffers of the same shapes every time. transformers' forward takes
longer to find out which they are than a small model takes to compute them. A StepProgram holds the ops with their
arguments, as bindings take them. What changes from step to step lies in arrays; each step gets its rotation, its caches
and its logits anew.

StepForward takes the place of a model's forward. A forward that is such a step over a RooftileCache runs on the
program, any other one in transformers.
"""

import copy
import functools
import inspect
import operator
import threading
import warnings

import torch
import torch.nn.modules.module as _modules
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutputWithPast

from rooftile import _C
from rooftile._calls import ran
from rooftile.errors import NotSupportedError
from rooftile.gemm import ARRAYS
from rooftile.integrations._models import CACHE_KEYWORDS, cache_keyword
from rooftile.integrations.transformers import RooftileCache
from rooftile.nn import PackedLinear

# Families of transformers whose layers are the same but for what the layers themselves say: biases, norms of q and k,
# windows, the activation.
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_KEPT = 4  # programs of a model, each of other rows
_call = functools.partial.__call__
_form = operator.attrgetter("shape", "dtype")
_MATMULS = {4: _C.w4a16_matmul, 8: _C.w8a16_matmul}
# What a step that the program takes may be given; what is None or False says nothing.
_KEYWORDS = {
    *("input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep", "return_dict"),
    *CACHE_KEYWORDS,
}
_OUTPUT_CACHE = next(name for name in CACHE_KEYWORDS if name in CausalLMOutputWithPast.__dataclass_fields__)


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
        with torch.inference_mode(False):  # so that steps in and out of it may write the buffers
            self._record(model)
        self._seen = tuple(zip(*self._checks, strict=True))
        self._children, self._kinds = zip(*self._classes, strict=True)
        self._forms = list(map(_form, self._tensors))

    def still_valid(self):
        """Whether modules, tensors, settings and classes are those that were recorded, and there are no hooks."""
        there, keys, seen = self._seen
        return (
            all(map(operator.is_, map(dict.get, there, keys), seen))
            and all(map(operator.is_, map(type, self._children), self._kinds))
            and list(map(_form, self._tensors)) == self._forms
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
        self.dtype = dtype = getattr(embedding._parameters.get("weight"), "dtype", None)
        self.embedding = self._tensor(embedding, "weight")
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise NotSupportedError(f"model: a step program is of float32, float16 or bfloat16, got {dtype}")
        layers = self._child(decoder, "layers", torch.nn.ModuleList)
        count = self._value(config, "num_hidden_layers")
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads

        def buffer(*shape):
            return torch.empty(self.batch, *shape, dtype=dtype)

        self._x, self._normed = buffer(config.hidden_size), buffer(config.hidden_size)
        self._q, self._k = buffer(1, heads, head_dim), buffer(1, kv_heads, head_dim)
        self._v, self._attended = buffer(1, kv_heads, head_dim), buffer(1, heads, head_dim)
        self._gate_up, self._h = buffer(2 * config.intermediate_size), buffer(config.intermediate_size)
        self._rows = torch.arange(self.batch, dtype=torch.int32)[:, None]  # of the step's rotary tables, a row each
        self._rotary = self._child(decoder, "rotary_emb", "RotaryEmbedding")
        # of every layer: calls before its cache's, (window, scale), calls behind them
        self._recorded = [self._layer(self._child(layers, str(i), "DecoderLayer"), config) for i in range(count)]
        self._last = [self._norm(self._child(decoder, "norm", "RMSNorm"), self._x, self._normed)]
        head = self._child(model, "lm_head", None)
        self._vocabulary = head.out_features if isinstance(head, PackedLinear) else len(self._tensor(head, "weight"))
        self._head = self._product_of(head, self._vocabulary, config.hidden_size)

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
        if tensor.device.type != "cpu":
            raise NotSupportedError(f"model: no step program on {tensor.device} in this release, only on the CPU")
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

    def _product_of(self, linear, outputs, inputs):
        """call(x, out, residual=None), which records a product with this layer of a weight [outputs, inputs]."""
        bias = self._tensor(linear, "bias")
        self._has_shape(linear, None if bias is None else bias.shape, outputs)
        if isinstance(linear, PackedLinear):
            for name in ARRAYS:
                self._tensor(linear, name, linear._buffers)
            self._has_shape(linear, (linear.out_features, linear.in_features), outputs, inputs)
            function, handle = _MATMULS[linear.WEIGHT.BITS], linear.weight._handle
            return lambda x, out, residual=None: functools.partial(
                function, x, handle, bias, None, residual, out, False, None, None, None
            )
        if type(linear) is not torch.nn.Linear:
            raise NotSupportedError(
                f"model: no step program of a {type(linear).__name__}; expected nn.Linear, W4Linear or W8Linear"
            )
        self._of_class(torch.nn.Linear)
        weight = self._tensor(linear, "weight")
        self._has_shape(linear, weight.shape, outputs, inputs)
        return lambda x, out, residual=None: functools.partial(
            _C.linear, x, weight, bias, None, residual, out, None, None, None
        )

    def _product(self, parent, name, x, out, residual=None):
        return self._product_of(self._child(parent, name, None), out.shape[-1], x.shape[-1])(x, out, residual)

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
        q, k, v = (x.view(self.batch, -1) for x in (self._q, self._k, self._v))
        before = [self._norm(self._child(layer, "input_layernorm", "RMSNorm"), self._x, self._normed)]
        for name, out in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
            before.append(self._product(attention, name, self._normed, out))
        if self._family == "Qwen3":
            for name, heads in (("q_norm", self._q), ("k_norm", self._k)):
                before.append(self._norm(self._child(attention, name, "RMSNorm"), heads, heads))
        attended = self._attended.view(self.batch, -1)
        behind = [self._product(attention, "o_proj", attended, self._x, residual=self._x)]
        norm = self._child(layer, "post_attention_layernorm", "RMSNorm")
        behind.append(self._norm(norm, self._x, self._normed))
        inner = config.intermediate_size
        for name, out in (("gate_proj", self._gate_up[:, :inner]), ("up_proj", self._gate_up[:, inner:])):
            behind.append(self._product(mlp, name, self._normed, out))
        behind.append(self._gated(self._child(mlp, "act_fn", None), config.hidden_act))
        behind.append(self._product(mlp, "down_proj", self._h, self._x, residual=self._x))
        windowed = config if type(attention).__name__ == "MistralAttention" else attention
        return before, (self._value(windowed, "sliding_window"), self._value(attention, "scaling")), behind

    def _gated(self, module, activation):
        if type(module) is not type(ACT2FN[activation]):
            raise NotSupportedError(
                f"model: no step program, because act_fn is a {type(module).__name__}, the config says {activation!r}"
            )
        if activation in ("silu", "swish"):
            return functools.partial(_C.silu_mul, self._gate_up, self._h, None, None)
        approximate = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu": "none"}.get(activation)
        if approximate is None:
            raise NotSupportedError(f"model: no step program with the activation {activation!r}")
        return functools.partial(_C.gelu_mul, self._gate_up, approximate, self._h, None, None)

    # ---- running ----

    @property
    def windows(self):
        """Of every layer: tokens that a query looks back, or None."""
        return [window for _, (window, _), _ in self._recorded]

    @property
    def new_key(self):
        """Has the shape of a layer's new keys, as transformers counts them: [batch, kv_heads, 1, head_dim]."""
        return self._k.transpose(1, 2)

    def embed(self, ids):
        """[batch, hidden_size] of the new tokens, ids int64 [batch, 1]."""
        return torch.nn.functional.embedding(ids, self.embedding)[:, 0]

    def run(self, x, caches, lengths):
        """Logits [batch, 1, vocabulary] of one token a row, x as of embed(), which every cache then holds.

        caches: one a layer, as bindings take them, each with `lengths` (int32 [batch]) tokens and room for one more.
        """
        # The model's own module says how the new positions are rotated: its settings may change, and it may count.
        cos, sin = (t[:, 0, : t.shape[-1] // 2] for t in self._rotary(x[:, None], lengths[:, None].long()))
        logits = torch.empty(self.batch, 1, self._vocabulary, dtype=self.dtype)
        calls = [functools.partial(torch.Tensor.copy_, self._x, x)]
        q, k, v, out = self._q, self._k, self._v, self._attended
        for (before, (window, scale), behind), cache in zip(self._recorded, caches, strict=True):
            calls += before
            rope = (q, k, v, cos, sin, self._rows, cache, None, None, q, None, None)
            attend = (q, cache, out, None, None, None, scale, window, None, None, None, None, None)
            calls += functools.partial(_C.rope_append, *rope), functools.partial(_C.decode_attention, *attend)
            calls += behind
        calls += self._last
        calls.append(self._head(self._normed[:, None], logits))
        _, *kernels = map(_call, calls)  # in C: no signal handler comes between two ops
        ran(*kernels)
        return logits


class StepForward:
    """model.forward of a model that rt.accelerate was called with."""

    def __init__(self, model):
        self.model = model
        self._names = ("input_ids", "attention_mask", "position_ids", cache_keyword(model))  # of positional arguments
        self._forget()

    def _forget(self):
        self._programs = {}  # by rows, the latest last
        self._refused = None  # why the last program could not be recorded
        self._lock = threading.RLock()  # of the programs' buffers; a signal handler may generate, too

    @property
    def __signature__(self):  # generate() asks what the forward takes
        return inspect.signature(type(self.model).forward.__get__(self.model))

    @property
    def __code__(self):  # torch.export asks
        return type(self.model).forward.__code__

    def __deepcopy__(self, memo):
        return type(self)(copy.deepcopy(self.model, memo))

    def __getstate__(self):
        return {"model": self.model, "_names": self._names}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._forget()

    def __call__(self, *args, **kwargs):
        if not torch.compiler.is_compiling():
            step = self._step_of(args, kwargs)
            if step is not None:
                return step
        return type(self.model).forward(self.model, *args, **kwargs)

    def _step_of(self, args, kwargs):
        """The output of a decode step over a RooftileCache, or None for any other forward."""
        if torch.is_grad_enabled() or self.model.training or torch.is_autocast_enabled("cpu") or torch.jit.is_tracing():
            return None
        given = dict(zip(self._names, args, strict=False))
        given.update((name, value) for name, value in kwargs.items() if value is not None and value is not False)
        cache = next((given[name] for name in CACHE_KEYWORDS if name in given), None)
        ids = given.get("input_ids")
        if type(cache) is not RooftileCache or len(args) > 4 or not given.keys() <= _KEYWORDS:
            return None
        if type(ids) is not torch.Tensor or ids.ndim != 2 or ids.shape[1] != 1 or ids.device.type != "cpu":
            return None
        if kwargs.get("use_cache") is False or kwargs.get("return_dict") is False or not _plain(self.model.config):
            return None
        kept = given.get("logits_to_keep", 0)
        if not isinstance(kept, int) or kept < 0:
            return None
        with self._lock:
            if not cache.can_step(ids.shape[0], given):
                return None
            program = self._program_for(ids.shape[0])
            if program is None:
                return None
            x = program.embed(ids)
            caches = cache.begin_step(program.new_key, program.windows)
            if caches is None:
                return None
            logits = program.run(x, [pages._handle for pages in caches], caches[0].seq_lens)
            cache.end_step()
        return CausalLMOutputWithPast(logits=logits, **{_OUTPUT_CACHE: cache})

    def _program_for(self, batch):
        """The program of so many rows, or None where the model has none any more, which is said once."""
        program = self._programs.pop(batch, None)
        if program is None or not program.still_valid():
            program = self._recorded(batch)
        if program is not None:
            self._programs[batch] = program
            while len(self._programs) > _KEPT:
                del self._programs[next(iter(self._programs))]
        return program

    def _recorded(self, batch):
        try:
            program, self._refused = StepProgram(self.model, batch), None
        except NotSupportedError as error:
            if self._refused != str(error):
                warnings.warn(f"rooftile: decode steps run in transformers: {error}", stacklevel=7)
            program, self._refused = None, str(error)
        return program


def _hooked(hooks):
    """Whether a module's dict of hooks has any but those of transformers, which wait until outputs are asked for."""
    return any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks.values())


def _plain(config):
    """Whether a forward of this config gives logits and a cache alone, in an object."""
    asks = ("output_attentions", "output_hidden_states")
    return not any(getattr(config, name, False) for name in asks) and getattr(config, "return_dict", True) is not False
