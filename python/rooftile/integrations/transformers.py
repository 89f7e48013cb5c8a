# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers (>= 5.17): attention over a compressed KV cache, with `model.generate()` as it is.

    rt.set_kv_cache(model, "int4-kivi")                 # a new cache for every generate()
    model.generate(**inputs)

    from rooftile.integrations.transformers import RooftileCache      # also registers the attention "rooftile"

    model.set_attn_implementation("rooftile")           # the same with a cache of one's own
    model.generate(**inputs, cache=RooftileCache(model.config, format="int4-kivi"))     # past_key_values before 5.24

How the pieces meet. For every layer transformers calls `cache.update(k, v)` and then the attention function with what
update returned. A prompt must be attended raw before it is stored, a few new tokens must be stored before they are
attended, so update() only holds the new keys and values and returns a handle; the attention function takes them from
it, attends and stores in the right order. Any other attention function fails at its first touch of the handle. Other
caches hand out tensors, which torch attends.

Padding. The mask function hands over which columns are padding instead of a 4-D mask. Padding is never stored: each
row of the cache holds its own tokens from position 0 on, so its bytes are those of the unpadded prompt.
transformers counts padded columns in `get_seq_length()`, and so does the cache towards transformers.

On a GPU a first prompt attends its raw keys and values with torch's scaled_dot_product_attention. Up to 16 tokens
behind it are stored and read by the decode kernels. A longer turn is attended by torch, over what the cache holds,
decoded piece by piece. No such forward makes the host wait: what the mask says is then compared with the cache on the
device, and a contradiction is raised at the next forward.
"""

import copy
import functools
import itertools
import weakref

import torch
from transformers import AttentionInterface, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.masking_utils import AttentionMaskInterface

import rooftile as rt
from rooftile import _C
from rooftile._arrays import check_flag
from rooftile._calls import all_or_none, refuse_export, setting_back
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from rooftile.integrations import _models, _tensors, step_loop
from rooftile.integrations._masks import Mask, rooftile_mask
from rooftile.integrations._models import CACHE, CACHE_KEYWORDS, cache_keyword
from rooftile.integrations.quantizer import RooftileConfig  # noqa: F401  registers quant_method "rooftile"
from rooftile.kv_cache import GROUP, KIVI, integer
from rooftile.kv_sliding import BACK, SlidingKVCache, pieces, ring_tokens

# Up to this many new tokens go through decode attention, which reads the cache once for all of them. On a GPU what is
# longer goes there in pieces of this many where torch cannot read it.
SHORT = 16
# Room for this many tokens beyond the first forward when no capacity is asked for; doubled when full.
HEADROOM = 256
_WHOLE_MASK = (
    "attention_mask: with a RooftileCache expected the 2-D padding mask [batch, columns]; a mask of shape {} is not "
    "implemented by the attention function 'rooftile'"
)


_STEP = "a step"  # RooftileLayer.held while a StepProgram runs


class _NewTokens:
    """Stands for the keys and values between RooftileLayer.update and the attention function "rooftile".

    Without __slots__, for which torch.compile looks in __getattr__.
    """

    def __init__(self, layer, key, value):
        self.layer, self.key, self.value = layer, key, value

    def __getattr__(self, name):
        raise self._misuse()

    def __getitem__(self, index):
        raise self._misuse()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        raise next(leaf for leaf in leaves if type(leaf) is cls)._misuse()

    def _misuse(self):
        if self.layer.attention() == "rooftile":
            return NotSupportedError(
                f"{CACHE}: this model's attention layers change the keys or values that they get from the "
                "cache, which a RooftileCache does not hand out; use a cache of transformers"
            )
        return NotSupportedError(
            f"{CACHE}: RooftileCache can only be read by the attention function 'rooftile': "
            "call model.set_attn_implementation('rooftile') before the forward, and reset() this cache"
        )


def rooftile_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    is_causal=None,
    **kwargs,
):
    """The attention function of transformers: query [B, Hq, T, D] -> ([B, T, Hq, D], None).

    Over a RooftileCache it attends and stores the new tokens; without a cache it is rt.prefill_attention, on a GPU
    torch's scaled_dot_product_attention. Keys and values of other caches, masks that are not causal with padding on
    the left, attention that is not causal (of a vision tower, of an encoder), and tensors whose gradients are asked for
    are attended by torch. Under torch.autocast it computes in autocast's dtype, as torch's attention does.
    """
    if dropout:
        raise NotSupportedError(f"dropout: rooftile is for inference, expected 0, got {dropout} (call model.eval())")
    if kwargs.get("output_attentions"):
        raise NotSupportedError(
            "output_attentions: the attention probabilities are never formed; use 'eager' to see them"
        )
    for name in ("position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise NotSupportedError(f"{name}: not implemented by the attention function 'rooftile'")
    options = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if is_causal is False or not getattr(module, "is_causal", True):
        out = _attend_both_ways(query, key, value, attention_mask, options)
    else:
        out = _attend(query, key, value, attention_mask, sliding_window, options)
    return out.contiguous(), None  # some models take a view of it


def _attend_both_ways(query, key, value, mask, options):
    """[B, T, Hq, D] of attention that is not causal: by torch, as in a model of transformers' own attention."""
    if type(key) is _NewTokens:
        raise NotSupportedError("is_causal: over a RooftileCache attention is causal, got is_causal=False")
    if type(mask) is Mask:
        mask = mask.dense()
    if mask is None:
        return _tensors.masked(query, key, value, None, **options)
    return _over_tensors(query, key, value, mask, None, options)


def _attend(query, key, value, mask, window, options):
    """[B, T, Hq, D], over whatever the keys and values are."""
    traced = torch.compiler.is_compiling()
    cached = type(key) is _NewTokens
    if traced and cached:
        return _attend_traced(key.layer, query, key.key, key.value, mask, window, options)
    if mask is None and not traced:
        mask = Mask(window=window)
    if not cached:
        prompt = key.shape == value.shape and key.shape[2] == query.shape[2]
        if traced or _differentiated(query, key, value) or not prompt or type(mask) is not Mask or not mask.is_causal():
            return _over_tensors(query, key, value, mask, window, options)
    elif type(mask) is not Mask:
        raise NotSupportedError(_WHOLE_MASK.format(list(mask.shape)))
    mask.read_causal()
    mask = mask.on(query.device)
    options["window"] = mask.window
    if cached:
        (query,) = _autocast(query)
        return key.layer.attend_held(query, key, mask, options)
    q, k, v = (mask.tokens_first(x.transpose(1, 2)) for x in _autocast(query, key, value))
    if q.is_cuda:
        out = _tensors.prompt(q, k, v, mask.counts, **options)
    else:
        out = rt.prefill_attention(q, k, v, counts=mask.counts, **options)
    return mask.columns(out)


def _autocast(*arrays):
    """Under torch.autocast the arrays in its dtype: rotary embeddings leave float32 beside values in 16 bits."""
    device = arrays[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return arrays
    return tuple(array.to(torch.get_autocast_dtype(device)) for array in arrays)


def _differentiated(*tensors):
    """Whether gradients of any of the tensors are asked for, which our kernels do not have."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _over_tensors(query, key, value, mask, window, options):
    """query [B, Hq, T, D] over the keys and values [B, Hkv, S, D] of another cache than a RooftileCache."""
    if type(mask) is Mask:
        mask = mask.dense()
    if mask is None:
        mask = _tensors.causal(query.shape[2], key.shape[2], window, query.device)
    if mask.shape[-1] != key.shape[2]:
        raise NotSupportedError(
            f"attention_mask: the mask is of {mask.shape[-1]} keys, the layer has {key.shape[2]}: keys that this model "
            "adds to the cache's are not implemented by the attention function 'rooftile'; use 'sdpa' or 'eager'"
        )
    return _tensors.masked(query, key, value, mask.to(query.device), **options)


# The layers of all caches by number, for operators in a graph.
_layers = weakref.WeakValueDictionary()
_numbers = itertools.count()
_library = torch.library.Library("rooftile", "FRAGMENT")
_library.define(
    "attend_layer(Tensor query, Tensor key, Tensor value, Tensor? tokens, Tensor(a!) layer, float? scale, int? window, "
    "float? softcap, Tensor? sinks) -> Tensor"
)


def _attend_traced(layer, query, key, value, mask, window, options):
    """RooftileLayer.attend as torch.compile records it: one operator, which finds the layer by its number."""
    query, key, value = _autocast(query, key, value)
    tokens = None
    if type(mask) is Mask:
        tokens, window = mask.arguments["attention_mask"], mask.traced_window(window)
    elif mask is not None:
        raise NotSupportedError(_WHOLE_MASK.format(list(mask.shape)))
    scale, softcap, sinks = options["scale"], options["softcap"], options["sinks"]
    return torch.ops.rooftile.attend_layer(query, key, value, tokens, layer.number, scale, window, softcap, sinks)


def _attend_layer(query, key, value, tokens, layer, scale, window, softcap, sinks):
    layer, length = _layers[layer.item()], query.shape[2]
    layer._settled()
    if layer.columns not in (layer.stored, layer._check_new(key, value)):
        raise layer.unfinished()
    mask = Mask.causal_of(tokens, length, window)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    return layer.attend(query, key, value, mask, options).contiguous()


for _device in ("CPU", "CUDA"):
    _library.impl("attend_layer", _attend_layer, _device)
torch.library.register_fake(
    "rooftile::attend_layer",
    lambda query, *_: query.new_empty([query.shape[i] for i in (0, 2, 1, 3)]),
    lib=_library,
)


class _Contradiction:
    """Whether a mask contradicted the cache on a GPU, which the host learns without waiting for it."""

    def __init__(self, device):
        with torch.inference_mode(False):  # so that forwards in and out of it may write them
            self.found = torch.zeros((), dtype=torch.bool, device=device)
            self.seen = torch.zeros((), dtype=torch.bool, device="cpu").pin_memory()

    def add(self, found):
        self.found |= found
        self.seen.copy_(self.found, non_blocking=True)

    def __deepcopy__(self, memo):  # a copied tensor would not be pinned
        return _Contradiction(self.found.device)


class RooftileLayer(CacheLayerMixin):
    """One layer of a RooftileCache: an rt.KVCache that is made at first use and grows.

    In a sliding layer it becomes a SlidingKVCache where that takes less memory.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True  # kivi formats and full windows by a few tokens; a longer crop is refused

    def __init__(self, format, capacity, dtype, stepwise, attention):
        """attention: a function that returns the name of the model's attention implementation."""
        super().__init__()
        self.format, self.capacity, self.dtype, self.stepwise = format, capacity, dtype, stepwise
        self.attention = attention
        self.cache = None  # rt.KVCache or SlidingKVCache
        self.columns = 0  # what transformers calls the sequence length: tokens and padding
        self.stored = 0  # columns that were attended and stored: in a graph `columns` is late
        self.before = None  # the layer before this one in a cache
        self._take_number()
        self.pads = None  # how many columns of each row are padding, a list; None: none is
        self.begun = False  # whether every row has a token
        self.contradiction = None  # _Contradiction, of steps on a GPU
        self.window = None  # tokens that a query looks back in a sliding layer
        self.held = None  # _NewTokens between update() and the attention function; _STEP

    def _take_number(self):
        number = next(_numbers)
        _layers[number] = self
        # For the operator. A graph is of any number in a tensor, of one int only; "written", it keeps a graph in order.
        with torch.inference_mode(False):  # so that graphs in and out of it may "write" it
            self.number = torch.tensor(number, device="cpu")

    def __setstate__(self, state):  # a copy is another layer
        self.__dict__.update(state)
        self._take_number()

    @property
    def batch_size(self):
        return self.cache.batch if self.cache is not None else -1

    def lazy_initialization(self, key_states, value_states):
        """Nothing: how much room a layer needs is known when its first tokens are attended."""

    def update(self, key_states, value_states, *args, **kwargs):
        """Holds the new keys and values [B, Hkv, T, D] for the attention function; returns a handle to them, twice."""
        if torch.compiler.is_compiling():
            # Inductor fails where a graph compares what it returns: nothing here may compare the columns of two layers.
            self.columns += key_states.shape[2]
            new = _NewTokens(self, key_states, value_states)
            return new, new
        self._settled()
        if self.columns != self.stored:
            raise self.unfinished()
        key_states, value_states = _autocast(key_states, value_states)
        self.columns = self._check_new(key_states, value_states)
        self.is_initialized = True
        self.held = _NewTokens(self, key_states, value_states)
        return self.held, self.held

    def _check_new(self, key_states, value_states):
        """Columns with the new ones."""
        shape = key_states.shape
        if shape != value_states.shape:
            raise NotSupportedError(
                f"{CACHE}: RooftileCache keeps keys and values of one shape, got keys {list(shape)} "
                f"and values {list(value_states.shape)} (multi-head latent attention)"
            )
        if self.cache is not None and shape[0] != self.cache.batch:
            raise ArgumentError(
                f"{CACHE}: this RooftileCache holds {self.cache.batch} rows, the input has {shape[0]}; call "
                "reset() or use a new cache"
            )
        columns = self.stored + shape[2]
        if self.before is not None and self.before.stored != columns:
            raise ArgumentError(
                f"{CACHE}: a layer would hold {columns} columns, the layer before it {self.before.stored}: an "
                "earlier forward stopped half way; reset() this cache"
            )
        return columns

    def attend_held(self, query, new, mask, options):
        """attend() of what update() held."""
        if new is not self.held:
            raise ArgumentError("key: these keys and values were stored already; every update() is attended once")
        out = self.attend(query, new.key, new.value, mask, options)
        self.held = None
        return out

    def attend(self, query, key, value, mask, options):
        """query [B, Hq, T, D] against the cache and new tokens [B, Hkv, T, D], which are stored: [B, T, Hq, D]."""
        length, before = key.shape[2], self.stored
        self._make_room(key, options["window"])
        self._check_mask(mask, before)
        q = mask.tokens_first(query.transpose(1, 2))
        k = mask.tokens_first(key.transpose(1, 2))
        v = mask.tokens_first(value.transpose(1, 2))
        if self.stepwise or (before and length <= SHORT):
            out = self._store_and_attend(q, k, v, mask.counts, options)
        else:
            out = self._attend_and_store(q, k, v, mask.counts, before, options)
        self.stored = before + length
        self.is_initialized = True
        return mask.columns(out)

    def _make_room(self, key, window):
        """For the columns stored and the new ones. With a window no more than it takes to attend the next tokens."""
        self.window = window
        columns = self.stored + key.shape[2]
        most = None if window is None else ring_tokens(window)
        if isinstance(self.cache, SlidingKVCache):
            if window != self.cache.window:
                raise NotSupportedError(
                    f"attention_mask: this layer slid over {self.cache.window} tokens in earlier forwards, now over "
                    f"{window}: what is needed may be gone; reset() this cache"
                )
            return
        if self.cache is None:
            room = max(self.capacity or columns + HEADROOM, columns)
        elif columns > self.cache.capacity:
            room = max(2 * self.cache.capacity, columns)
        else:
            return
        slides = most is not None and columns > most
        room = room if most is None else min(room, most)
        if self.cache is None:
            batch, kv_heads, _, head_dim = key.shape
            options = {"format": self.format, "dtype": self.dtype or key.dtype, "device": key.device}
            self.cache = rt.KVCache(batch, 0 if slides else room, kv_heads, head_dim, **options)
        elif not slides:
            self.cache = self.cache.select(capacity=room)
        if slides:
            self.cache = SlidingKVCache(window, self.cache)

    @property
    def _pages(self):
        """The cache as kernels take it."""
        return self.cache.view if isinstance(self.cache, SlidingKVCache) else self.cache

    def _append(self, k, v, counts, longest):
        if isinstance(self.cache, SlidingKVCache):
            self.cache.append(k, v, counts=counts, longest=longest)
        else:
            self.cache.append(k, v, counts=counts)

    def _attend_and_store(self, q, k, v, counts, before, options):
        """A prompt, or a long turn: new tokens see each other as they are."""
        if not q.is_cuda:
            past = self._pages if before else None
            out = rt.prefill_attention(q, k, v, cache=past, counts=counts, **options)
        elif not before:
            out = _tensors.prompt(q, k, v, counts, **options)
        elif _tensors.reads_behind(q, options["softcap"], options["sinks"]):
            lengths = [before] * len(q) if self.pads is None else [max(before - pad, 0) for pad in self.pads]
            scale, window = options["scale"], options["window"]
            out = _tensors.behind(q, k, v, self._pages, lengths, counts, scale=scale, window=window)
        else:
            return self._store_and_attend(q, k, v, counts, options)
        self._append(k, v, counts, before + k.shape[1])
        return out

    def _store_and_attend(self, q, k, v, counts, options):
        """The new tokens as decode steps see them, in pieces that kernels, kivi formats and a ring take."""
        length = q.shape[1]
        sizes = [length]
        if q.is_cuda:
            sizes.append(SHORT)
        if self.format in KIVI:
            sizes.append(GROUP)
        if isinstance(self.cache, SlidingKVCache):
            sizes.append(BACK)
        size = min(sizes)
        outs = []
        for piece, real in pieces(length, size, counts):
            self._append(k[:, piece], v[:, piece], real, self.stored + length)
            outs.append(rt.decode_attention(q[:, piece], self._pages, counts=real, **options))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _check_mask(self, mask, before):
        """The mask and the cache must agree on how many tokens each row holds."""
        if mask.tokens is not None and self.begun:
            if not mask.compared:
                self._compare_later(mask)
            return
        mask.read()
        if mask.stored is not None or self.pads:
            held = self.cache.seq_lens
            told = torch.full_like(held, before) if mask.stored is None else mask.stored
            if (told != held).any():
                row = int((told != held).nonzero()[0])
                raise ArgumentError(
                    f"attention_mask: it says that row {row} has {int(told[row])} tokens in the cache, the cache holds "
                    f"{int(held[row])}; pass the mask of all columns, cached and new, as it was for the earlier ones"
                )
        self.pads, self.begun = mask.pads, mask.begun

    def _compare_later(self, mask):
        """The same on a GPU, without waiting for it: every row must be padding, then its stored and its new tokens."""
        if self.contradiction is None:
            self.contradiction = _Contradiction(mask.tokens.device)
        columns = mask.tokens.shape[1]
        first = columns - mask.q_length - self.cache.seq_lens
        expected = torch.arange(columns, device=first.device) >= first[:, None]
        self.contradiction.add((mask.tokens != expected).any())
        mask.compared = True

    def _settled(self):
        if self.contradiction is not None and self.contradiction.seen:
            raise ArgumentError(
                "attention_mask: in an earlier forward it did not say left padding, then the tokens that the cache "
                "holds, then the new ones; reset() this cache and pass the mask of all columns each time"
            )
        if self.held is not None:
            raise self.unfinished()

    def may_step(self, batch, columns):
        """Whether the layer holds that many columns of that many rows, each with a token, in an rt.KVCache."""
        whole = self.columns == self.stored == columns and self.held is None
        whole = whole and (self.contradiction is None or not self.contradiction.seen)
        return (
            whole and self.begun and not self.stepwise and type(self.cache) is rt.KVCache and self.batch_size == batch
        )

    def unfinished(self):
        return NotSupportedError(
            f"{CACHE}: the tokens of an earlier forward were not stored, because it stopped half way or ran "
            "another attention function than 'rooftile' (model.set_attn_implementation('rooftile')); "
            "reset() this cache"
        )

    def get_mask_sizes(self, query_length):
        return self.columns + query_length, 0

    def get_seq_length(self):
        return self.columns

    def get_max_length(self):
        return -1

    def reset(self):
        """Forgets everything, the memory included."""
        self.cache = self.held = self.contradiction = None
        self.columns = self.stored = 0
        self.pads = None
        self.begun = self.is_initialized = False

    def offload(self):
        raise NotSupportedError("offloading: a RooftileCache stays on its device")

    prefetch = offload

    def reorder_cache(self, beam_idx):
        self._settled()
        if self.cache is not None:
            if beam_idx.dtype == torch.bool:
                raise ArgumentTypeError("reorder_cache: beam_idx must be integers, got a tensor of bool")
            self._change_rows(self.cache.reorder, beam_idx.tolist())

    def batch_select_indices(self, indices):
        self._settled()
        if self.cache is not None:
            if indices.dtype == torch.bool:
                if indices.shape != (self.batch_size,):
                    raise ArgumentError(
                        f"batch_select_indices: indices must be [{self.batch_size}] where they are a mask, got bool "
                        f"{list(indices.shape)}"
                    )
                indices = indices.nonzero().flatten()
            self.cache = self._change_rows(self.cache.select, indices.tolist())

    def _change_rows(self, change, index):
        result = change(index)
        self.pads = self.pads and [self.pads[row] for row in index]
        return result

    def batch_repeat_interleave(self, repeats):
        self.batch_select_indices(torch.arange(max(self.batch_size, 0), device="cpu").repeat_interleave(repeats))

    def crop(self, tokens_to_remove):
        """Takes back the newest -tokens_to_remove columns; a positive value is the length to keep (before 5.18).

        Raises ArgumentError where the format cannot: kivi formats take back 16 tokens, or go to a multiple of 32.
        """
        self._settled()
        keep = self.columns + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.columns)
        keep = max(int(keep), 0)  # transformers before 5.18 gives a tensor
        if self.cache is None or keep == self.columns:
            return
        tokens = [max(length - (self.columns - keep), 0) for length in self.cache.lengths]
        try:
            self.cache.truncate(list(range(self.cache.batch)), tokens)
        except ArgumentError as e:
            most = _C.kv_step_back if self.format in KIVI else BACK
            raise ArgumentError(
                f"{CACHE}: {e} (assisted generation takes back what it proposed in vain: set num_assistant_tokens, or "
                f"prompt_lookup_num_tokens, to {most} or less)"
            ) from None
        self.begun = all(tokens)
        self.columns = self.stored = keep

    def undo_of_crop(self):
        """What takes back a crop(), as all_or_none takes it."""
        arrays = () if self.cache is None else self._pages._positions
        undo = setting_back(arrays)
        for name in ("columns", "stored", "begun"):
            undo.append(functools.partial(setattr, self, name, getattr(self, name)))
        if isinstance(self.cache, SlidingKVCache):
            undo.append(functools.partial(setattr, self.cache, "beyond", self.cache.beyond))
        return undo

    @property
    def nbytes_dynamic(self):
        if self.cache is None:
            return 0
        pages = self._pages
        tokens = self.columns if self.window is None else min(self.columns, self.window - 1)
        element = 4 if pages.dtype == "float32" else 2
        return 2 * self.cache.batch * pages.kv_heads * tokens * pages.head_dim * element


class RooftileCache(Cache):
    """A KV cache of transformers in any rooftile format.

    It goes into a forward and generate() as `cache`, before transformers 5.24 as `past_key_values`.

    config: the model's config. format: one name for all layers, or {"default": name, layer: name}, as rt.ModelKVCache
    takes it; see docs/guide/cache-formats.md. capacity: tokens to make room for at once; the cache grows beyond it by
    doubling, which copies it. Sliding layers never hold more than their window takes. dtype: of the keys and values,
    default that of the first ones. stepwise: a forward over T tokens gives what T forwards over one token give (its
    tokens are stored before they are attended), which is how text is scored under a compressed cache. turns: generate()
    may be called again with this cache, for a text that begins with the one it holds; without it a second generate() is
    refused, as transformers would continue the first text.

        cache = RooftileCache(model.config, format="int4-kivi")
        model.generate(**inputs, cache=cache)          # cache.nbytes, cache.layers[i].cache (an rt.KVCache)

    Raises ArgumentError or ArgumentTypeError for a wrong format, dtype or capacity, NotSupportedError for models
    that it is not for, with the reason.
    """

    def __init__(self, config, *, format="int4-kivi", capacity=None, dtype=None, stepwise=False, turns=False):
        text = _models.text_config(config)
        if isinstance(capacity, bool):
            raise ArgumentTypeError("RooftileCache: capacity must be an integer or None, got bool")
        if capacity is not None:
            capacity = integer("RooftileCache", "capacity", capacity, 1)
        check_flag("RooftileCache", "stepwise", stepwise)
        check_flag("RooftileCache", "turns", turns)
        # without rows: what each layer's format is; a wrong format or dtype is refused here, not in the first forward
        empty = rt.ModelKVCache(text.num_hidden_layers, 0, 1, 1, 1, format=format, dtype=dtype)
        attention = functools.partial(getattr, text, "_attn_implementation", "")
        options = (capacity, dtype, stepwise, attention)
        super().__init__(layers=[RooftileLayer(layer.format, *options) for layer in empty])
        for before, layer in itertools.pairwise(self.layers):
            layer.before = before
        self.turns = turns
        self._generated = False
        self.steps = 0  # how many were taken by a StepProgram
        self.calls = None  # StepCalls of the latest one, on a GPU a StepGraph
        self.refused = False  # whether the model had no StepProgram since the last forward of several tokens

    @property
    def _is_user_defined(self):
        return self._generated

    @_is_user_defined.setter
    def _is_user_defined(self, value):
        """generate() sets this when it begins with a cache that it was given."""
        if self._generated and not self.turns and self.get_seq_length():
            raise ArgumentError(
                f"{CACHE}: an earlier generate() filled this RooftileCache with {self.get_seq_length()} "
                "columns, and its text would be continued. For another text use a new cache, or reset() this one "
                "(rt.set_kv_cache(model, ...) gives every generate() its own); for a next turn, whose ids begin with "
                "those of the turns before, make it with RooftileCache(..., turns=True)"
            )
        self._generated = value

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx >= len(self.layers):
            raise ArgumentError(
                f"{CACHE}: this RooftileCache is of a model with {len(self.layers)} layers, the model that was "
                f"called has a layer {layer_idx}; use RooftileCache(model.config) of this model"
            )
        self.refused = self.refused and key_states.shape[2] == 1
        return self.layers[layer_idx].update(key_states, value_states)

    # ---- decode steps of one token a row, by a StepProgram ----

    def may_step(self, ids):
        """Whether a forward over one new token a row, ids [batch, 1], is a step behind what the cache holds."""
        first = self.layers[0]
        return all(layer.may_step(len(ids), first.columns) for layer in self.layers) and (
            first.cache.seq_lens.device == ids.device
        )

    def agrees(self, given):
        """Whether what such a forward is given, by name, says what the cache holds. Anything odd is for transformers'
        forward to judge. On a GPU the host waits for what arrays say.
        """
        first = self.layers[0]
        lengths, columns = first.cache.seq_lens, first.columns + 1
        mask, positions, column = map(given.get, ("attention_mask", "position_ids", "cache_position"))
        if first.pads and (mask is None or positions is None):
            return False  # transformers counts columns then, as it did for the keys before
        for array in (mask, positions, column):
            if array is not None and (type(array) is not torch.Tensor or array.device != lengths.device):
                return False
        if mask is not None:
            expected = torch.arange(columns, device=mask.device) >= columns - 1 - lengths[:, None]
            if mask.shape != expected.shape or not torch.equal(mask != 0, expected):
                return False
        if positions is not None and not (
            positions.ndim == 2 and positions.shape[1] == 1 and bool((positions[:, 0] == lengths).all())
        ):
            return False
        return column is None or (column.numel() == 1 and int(column) == first.columns)

    def step_caches(self, new_key, windows):
        """Every layer's rt.KVCache, with room for one more token a row. None where a layer slides, or this cache is of
        a model with other layers.
        """
        if len(self.layers) != len(windows):
            return None
        for layer, window in zip(self.layers, windows, strict=True):
            layer._make_room(new_key, window)
            if type(layer.cache) is not rt.KVCache:
                return None
        return [layer.cache for layer in self.layers]

    @property
    def slides(self):
        """Whether a layer holds the last tokens of a window alone, which a step program does not write."""
        return any(isinstance(layer.cache, SlidingKVCache) for layer in self.layers)

    def begin_step(self):
        """The step's kernels are next. end_step() follows; until then the layers hold a step, and are of no use to
        anything else but reset().
        """
        for layer in self.layers:
            layer.held = _STEP

    def end_step(self):
        self.steps += 1
        for layer in self.layers:
            layer.columns = layer.stored = layer.columns + 1
            layer.held = None

    def make_room(self, columns):
        """Before the first forward: for that many columns, unless the cache was made with a capacity."""
        for layer in self.layers:
            layer.capacity = layer.capacity or columns

    def _checked(self, op):
        """Raises what is wrong with any layer before the first one changes."""
        for layer in self.layers:
            layer._settled()
            if layer.cache is not None:
                layer.cache._check(op)

    def reorder_cache(self, beam_idx):
        self._checked("reorder")
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices):
        self._checked("select")
        super().batch_select_indices(indices)

    def crop(self, tokens_to_remove):
        """RooftileLayer.crop in every layer, or in none."""
        for layer in self.layers:
            layer._settled()
        undo = [call for layer in self.layers for call in layer.undo_of_crop()]
        all_or_none([functools.partial(layer.crop, tokens_to_remove) for layer in self.layers], undo)

    def reset(self):
        super().reset()
        self._generated, self.calls, self.refused = False, None, False

    @property
    def nbytes(self):
        """Bytes allocated for all layers: codes, scales, raw rings."""
        return sum(layer.cache.nbytes for layer in self.layers if layer.cache is not None)

    @property
    def nbytes_dynamic(self):
        """Bytes that transformers' own DynamicCache(config=model.config) holds for the same columns."""
        return sum(layer.nbytes_dynamic for layer in self.layers)


class _FreshCache:
    """The forward pre-hook of set_kv_cache: a forward that keeps a cache and is given none gets a new RooftileCache,
    unless it is one for gradients, which pass through no such cache.
    """

    def __init__(self, options, keyword):
        self.options = options
        self.keyword = keyword  # what the model's forward calls its cache
        self.handle = None  # of the hook

    def make(self, model):
        return RooftileCache(model.config, turns=True, **self.options)

    @torch.compiler.disable
    def __call__(self, model, args, kwargs):
        keeps = kwargs.get("use_cache")
        keeps = getattr(model.config, "use_cache", True) if keeps is None else keeps
        # positional arguments of a causal language model: input_ids, attention_mask, position_ids, the cache
        if (
            keeps
            and all(x is None for x in args[3:4])
            and not (_has_cache(kwargs) or _differentiated(*model.parameters()))
        ):
            refuse_export(
                "set_kv_cache",
                "a cache counts tokens on the host; give use_cache=False, or take the cache back with "
                "set_kv_cache(model, None)",
            )
            made = self.make(model)
            if len(args) > 3:
                args = (*args[:3], made, *args[4:])
            else:
                kwargs[self.keyword] = made
        return args, kwargs


def _has_cache(kwargs):
    return any(kwargs.get(name) is not None for name in CACHE_KEYWORDS)


def _generate(model, fresh, *args, **kwargs):
    """model.generate after set_kv_cache: it gets a new RooftileCache where it would make a DynamicCache."""
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)

    def setting(name):
        values = (kwargs.get(name), getattr(given, name, None), getattr(model.generation_config, name, None))
        return next((value for value in values if value is not None), None)

    dynamic, forward = setting("cache_implementation") in (None, "dynamic"), vars(model).get("forward")
    made = dynamic and not _has_cache(kwargs) and setting("use_cache") is not False
    if made:
        kwargs[CACHE] = fresh.make(model)
    cache = kwargs.get(CACHE)
    if not made and type(cache) is RooftileCache:
        _check_goes_on(cache, kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None)))
    ours = type(cache) is RooftileCache and hasattr(forward, "loop") and len(args) <= 5
    if ours and _calls_forward_alone(model, fresh):
        other = step_loop.other_loop(setting)
        if other == "stop_strings" and None not in map(kwargs.get, ("stop_strings", "tokenizer")):
            other, kwargs = None, _stop_strings_as_criterion(kwargs)
        if other is None:
            kwargs["custom_generate"] = forward.loop(cache, kwargs.get("streamer"), keeps_cache=not made)
        else:
            forward.say(f"generate: {other} asks for transformers' loop, which takes longer between two steps")
    if made and setting("cache_implementation") == "dynamic":
        return _generate_unnamed(model, given, args, kwargs)
    return type(model).generate(model, *args, **kwargs)


def _check_goes_on(cache, ids):
    """Raises ArgumentError for a text without a token behind those that the cache holds: transformers would store all
    of it once more.
    """
    held = cache.get_seq_length()
    if held and isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[1] <= held:
        raise ArgumentError(
            f"generate: input_ids has {ids.shape[1]} tokens a row, {CACHE} holds {held}; expected those and at least "
            f"one more ({CACHE}.reset() forgets them)"
        )


def _stop_strings_as_criterion(kwargs):
    """The arguments of generate() with stop_strings= as the criterion that transformers makes of them: for a loop that
    is not its own it would have no tokenizer.
    """
    kwargs = dict(kwargs)
    criterion = StopStringCriteria(stop_strings=kwargs.pop("stop_strings"), tokenizer=kwargs.pop("tokenizer"))
    kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), criterion])
    return kwargs


def _calls_forward_alone(model, fresh):
    """Whether a call of the model in generate() is a call of its forward: it has no other hook than set_kv_cache's, and
    no methods of generate() of its own. Phi-3 with a rotation of two lengths begins anew where it takes the other one.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and "prepare_inputs_for_generation" in vars(type(model)):
        return False
    hooks = [*model._forward_hooks.values(), *model._forward_pre_hooks.values()]
    own = (name for name in vars(model) if name != "generate" and callable(getattr(GenerationMixin, name, None)))
    return hooks == [fresh] and not any(own)


def _generate_unnamed(model, given, args, kwargs):
    """generate() with a cache where a kind of cache is named too, in the call or a config: transformers refuses both.

    given: the call's GenerationConfig or None. What it leaves open transformers takes from the model's.
    """
    kwargs.pop("cache_implementation", None)
    if given is not None:
        given = copy.deepcopy(given)
        given.cache_implementation = None
        if len(args) > 1:
            args = (args[0], given, *args[2:])
        else:
            kwargs["generation_config"] = given
    own = model.generation_config
    named, own.cache_implementation = own.cache_implementation, None
    try:
        return type(model).generate(model, *args, **kwargs)
    finally:
        own.cache_implementation = named


def _has_ours(model):
    own = vars(model).get("generate")
    return isinstance(own, functools.partial) and own.func is _generate


def check_generate(caller, model):
    """Raises NotSupportedError where a generate() that somebody else gave this model would be lost. One that is its
    class's all the same, bound to it, gives way.
    """
    own, plain = vars(model).get("generate"), type(model).generate
    if isinstance(own, functools.partial):
        bound = (own.func, own.args, own.keywords) == (plain, (model,), {})
    else:
        bound = own is None or getattr(own, "__func__", None) is plain
    if not bound and not _has_ours(model):
        raise NotSupportedError(f"{caller}: model has a generate of its own, which a cache for it would bypass")


def set_kv_cache(model, format, options):
    """rt.set_kv_cache."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise ArgumentTypeError(
            f"set_kv_cache: model must be a language model of transformers that generates, got {type(model).__name__}"
        )
    if format is not None:
        RooftileCache(model.config, format=format, **options)  # raises what would be wrong with every cache
        _models.check_interface(type(model))
        check_generate("set_kv_cache", model)
    if _has_ours(model):
        model.__dict__.pop("generate").args[1].handle.remove()
    if format is not None:
        fresh = _FreshCache({"format": format, **options}, cache_keyword(type(model)))
        fresh.handle = model.register_forward_pre_hook(fresh, with_kwargs=True)
        model.generate = functools.partial(_generate, model, fresh)
        _models.decoder(model).set_attn_implementation("rooftile")


AttentionInterface.register("rooftile", rooftile_attention)
AttentionMaskInterface.register("rooftile", rooftile_mask)
