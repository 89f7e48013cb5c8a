# SPDX-License-Identifier: Apache-2.0
"""A whole model of transformers on rooftile: weights, cache, and decode steps that run as one program."""

import contextlib

from rooftile._arrays import check_flag, must_be
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from rooftile.kv_model import set_kv_cache
from rooftile.quantize import W4A16, W8A16, quantize_

_NAMED = {"w4a16": W4A16(), "w8a16": W8A16()}


def accelerate(
    model, *, weights=None, kv_cache="int4-kivi", head=None, cuda_graphs=True, batch_invariant=False, progress=True
):
    """Makes a causal language model of transformers fast, in place, and returns it.

    model: Llama, Mistral, Qwen2, Qwen3, Phi3, OLMo2, Granite or Gemma 1 to 3 of transformers (LlamaForCausalLM, ...),
    on the CPU or one GPU (there in float16 or bfloat16). weights: "w4a16", "w8a16", a W4A16 or a W8A16: the layers are
    rounded so (quantize_); None leaves them as they are. head: the same for the output head alone, whose reading takes
    a sixth of a small model's step; it is untied from the embedding then, and the model cannot be saved. A head that is
    in so many bits already, such as a GGUF file's in Q8_0 (load_gguf), stays, in whatever groups. kv_cache:
    the format of the caches (set_kv_cache), a name or a dict; None leaves that as it is. cuda_graphs: whether the steps
    over a cache on a GPU become a CUDA graph; without one the host launches the same kernels one by one at each step.
    batch_invariant: whether a row of a step has the same bits alone as in any batch, which costs speed; on a GPU every
    layer has to be in 4 or 8 bits then. It is set on the packed layers, True or False, and not saved with them.
    progress: a bar while weights are rounded.

    From then on a forward over one new token a row and a RooftileCache, of every generate() and pipeline, runs as one
    list of ops on buffers of its own (a step program, recorded at the first step of each batch size), on a GPU as a
    CUDA graph of them (captured at the second step over each cache). Weights of q, k and v, and of gate and up, move to
    lie side by side, so that each is one product; on the CPU packed weights move together, into a step's order.
    generate(), greedy or sampling, has its own loop over tokens then (with kv_cache=, or after set_kv_cache); on a GPU
    the host is a token behind. Prompts, several new tokens of a row at once, gradients, autocast, torch.compile and
    what else is no such step run in transformers as before. The step computes what the layers say: in float32 the
    greedy tokens are those of transformers' forward, but for ties that rounded codes of a cache may turn; in 16 bits
    logits differ by roundings. Layers with hooks, of other classes, or on another device are not bypassed: their steps
    run in transformers, with a warning.

        model = transformers.AutoModelForCausalLM.from_pretrained("llama", dtype="bfloat16")
        rt.accelerate(model, weights="w4a16", kv_cache="int4-kivi", head="w8a16")
        model.generate(**inputs)

    Threads may call the model: steps of one model take turns. Raises ArgumentError or ArgumentTypeError naming the
    argument, NotSupportedError for a model that has no step program, before anything is changed.
    """
    from transformers import PreTrainedModel

    from rooftile.integrations._models import refuse_resizing
    from rooftile.integrations.step_forward import StepForward
    from rooftile.integrations.step_products import put_in_step_order, put_side_by_side
    from rooftile.integrations.step_program import StepProgram
    from rooftile.integrations.transformers import RooftileCache, check_generate
    from rooftile.nn import PackedLinear

    if not isinstance(model, PreTrainedModel):
        raise ArgumentTypeError(f"accelerate: model must be a model of transformers, got {type(model).__name__}")
    if "forward" in vars(model) and not isinstance(model.forward, StepForward):
        raise NotSupportedError("accelerate: model has a forward of its own, which a step program would bypass")
    check_flag("accelerate", "cuda_graphs", cuda_graphs)
    check_flag("accelerate", "batch_invariant", batch_invariant)
    check_flag("accelerate", "progress", progress)
    weights, head = _rounding("weights", weights), _rounding("head", head)
    # what may be refused, before anything changes
    try:
        family = StepProgram(model, 1).family
    except NotSupportedError as error:
        raise NotSupportedError(f"accelerate: {error}") from None
    if kv_cache is not None:
        check_generate("accelerate", model)
        with _naming("kv_cache"):
            RooftileCache(model.config, format=kv_cache)
    if weights is not None:
        _check_bits(model, weights.bits)
    output = model.get_output_embeddings()
    if head is not None and isinstance(output, PackedLinear):
        if output.WEIGHT.BITS == head.bits:
            head = None
        else:
            output = _dequantized(output, model.dtype)
    if head is not None:
        head = head.fitting("accelerate: head", output.weight.shape)
        head.in_range("accelerate: head", output.weight)
    if batch_invariant:
        _check_packed(model, weights, head)
    if weights is not None:
        with _naming("weights"):
            quantize_(model, weights, progress=progress)
    if head is not None:
        model.set_output_embeddings(head.module_of(output))
        model.config.get_text_config(decoder=True).tie_word_embeddings = False
        model.save_pretrained = _no_saving
    if isinstance(model.get_output_embeddings(), PackedLinear):
        refuse_resizing(model)
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.batch_invariant = batch_invariant
    products = [  # of a step, in order
        [getattr(module, name) for name in names]
        for layer in model.model.layers
        for module, names in (
            *((layer.self_attn, family.qkv), (layer.self_attn, ("o_proj",))),
            *((layer.mlp, family.gate_up), (layer.mlp, ("down_proj",))),
        )
    ]
    for linears in products:
        put_side_by_side(linears)
    put_in_step_order([*products, [model.get_output_embeddings()]])
    if kv_cache is not None:
        set_kv_cache(model, kv_cache)
    if "forward" not in vars(model):
        model.forward = StepForward(model)
    model.forward.set_cuda_graphs(cuda_graphs)
    return model


@contextlib.contextmanager
def _naming(argument):
    """Errors of what is called inside begin with the argument that it is called for."""
    try:
        yield
    except (ArgumentError, ArgumentTypeError, NotSupportedError) as error:
        raise type(error)(f"accelerate: {argument}: {error}") from None


def _check_bits(model, bits):
    """Raises ArgumentError where a layer is packed in other bits, which rounding would leave as they are."""
    from rooftile.nn import PackedLinear

    for name, module in model.named_modules():
        if isinstance(module, PackedLinear) and module.WEIGHT.BITS != bits and not name.endswith("lm_head"):
            raise ArgumentError(
                f"accelerate: weights: '{name}' is a {type(module).__name__} already, expected an nn.Linear or "
                f"{bits} bits; pass weights=None to keep the model's"
            )


def _check_packed(model, weights, head):
    """Raises ArgumentError where a layer on a GPU will stay in 16 bits: its sums change with the number of rows."""
    from torch.nn import Linear

    output = model.get_output_embeddings()
    for name, module in model.named_modules():
        left = head is None if module is output else weights is None
        if left and isinstance(module, Linear) and module.weight.is_cuda:
            raise ArgumentError(
                f"accelerate: batch_invariant=True needs every layer of a model on a GPU in 4 or 8 bits, got '{name}' "
                f"in {module.weight.dtype}; pass {'head' if module is output else 'weights'}="
            )


def _dequantized(packed, dtype):
    """The nn.Linear that a packed layer stands for."""
    import torch

    linear = torch.nn.Linear(packed.in_features, packed.out_features, packed.bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(packed.weight.dequantize(dtype), requires_grad=False)
    linear.bias = packed.bias
    return linear


def _no_saving(*args, **options):
    """save_pretrained of a model whose head was rounded."""
    raise NotSupportedError(
        "save_pretrained: rt.accelerate rounded this model's output head, which no config.json can say; save the model "
        "before, or accelerate it without head="
    )


def _rounding(name, value):
    if value is None or isinstance(value, W4A16 | W8A16):
        return value
    if not isinstance(value, str):
        raise ArgumentTypeError(
            f"accelerate: {name} must be None, a name, a W4A16 or a W8A16, got {type(value).__name__}"
        )
    if value not in _NAMED:
        raise ArgumentError(f"accelerate: {name} {must_be(tuple(_NAMED), value)}")
    return _NAMED[value]
