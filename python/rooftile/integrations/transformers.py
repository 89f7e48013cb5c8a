# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers (>= 5.17): attention over a compressed KV cache, with `model.generate()` as it is.

    from rooftile.integrations.transformers import RooftileCache      # also registers the attention "rooftile"

    model.set_attn_implementation("rooftile")
    model.generate(**inputs, past_key_values=RooftileCache(model.config, format="int4-kivi"))

How the pieces meet. For every layer transformers calls `cache.update(k, v)` and then the attention function with what
update returned. A prompt must be attended raw before it is stored, a few new tokens must be stored before they are
attended, so update() only holds the new keys and values and returns a handle; the attention function takes them from
it, attends and stores in the right order. Any other attention function fails at its first touch of the handle.

Padding. The mask function hands over which columns are padding instead of a 4-D mask. Padding is never stored: each
row of the cache holds its own tokens from position 0 on, so its bytes are those of the unpadded prompt.
transformers counts padded columns in `get_seq_length()`, and so does the cache towards transformers.

On a GPU a first prompt attends its raw keys and values with torch's scaled_dot_product_attention. Whatever follows is
stored up to 16 tokens at a time and read by the decode kernels, and no such step makes the host wait: what the mask
says is then compared with the cache on the device, and a contradiction is raised at the next forward.
"""

import copy

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

import rooftile as rt
from rooftile.errors import ArgumentError, NotSupportedError
from rooftile.integrations.quantizer import RooftileConfig  # noqa: F401  registers quant_method "rooftile"

# Up to this many new tokens go through decode attention, which reads the cache once for all of them. On a GPU longer
# inputs behind a filled cache go there in pieces of this many.
SHORT = 16
# Room for this many tokens beyond the first forward when no capacity is asked for; doubled when full.
HEADROOM = 256


class _NewTokens:
    """Stands for the keys and values between RooftileLayer.update and the attention function "rooftile"."""

    __slots__ = ("key", "layer", "value")

    def __init__(self, layer, key, value):
        self.layer, self.key, self.value = layer, key, value

    def __getattr__(self, name):
        raise self._misuse()

    def __getitem__(self, index):
        raise self._misuse()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise cls._misuse()

    @staticmethod
    def _misuse():
        return NotSupportedError(
            "past_key_values: RooftileCache can only be read by the attention function 'rooftile': "
            "call model.set_attn_implementation('rooftile') before the forward, and reset() this cache"
        )


class _Mask:
    """Which columns are padding and how far a query looks back: what the attention function gets as attention_mask.

    tokens: bool [B, columns], what is not padding; None once it was read (or where no mask was given).
    Known after read(): stored: int64 [B], tokens of each row in the columns before the new ones, None when no column at
    all is padding. counts: int32 [B], tokens of each row among the new columns, None when all of them are tokens.
    begun: whether every row has a token by now, so that later columns cannot be padding.
    compared: whether a cache compares `tokens` with itself on the device, which makes reading them needless.
    """

    _ARRAYS = ("tokens", "stored", "counts", "to_tokens", "to_columns")
    __slots__ = (*_ARRAYS, "begun", "compared", "copies", "device", "q_length", "window")

    def __init__(self, window, tokens=None, q_length=0):
        self.window, self.tokens, self.q_length = window, tokens, q_length
        self.stored = self.counts = self.to_tokens = self.to_columns = None
        self.begun, self.compared = True, False
        self.device, self.copies = None if tokens is None else tokens.device, {}

    def on(self, device):
        """The mask for layers on `device`, which share one copy (a model may be spread over several)."""
        if self.device in (None, device):
            return self
        if device not in self.copies:
            twin = self.copies[device] = copy.copy(self)
            twin.device, twin.copies = device, {}
            for name in self._ARRAYS:
                array = getattr(self, name)
                setattr(twin, name, None if array is None else array.to(device))
        return self.copies[device]

    def read(self):
        """Looks at the columns, for which a GPU is waited for. Raises ArgumentError for padding behind a token."""
        tokens, self.tokens = self.tokens, None
        if tokens is None or tokens.all():
            return
        after = tokens[:, :-1] & ~tokens[:, 1:]
        if after.any():
            row, column = after.nonzero()[0].tolist()
            raise ArgumentError(
                f"attention_mask: row {row} has padding at column {column + 1}, behind a token; only left padding is "
                "supported (tokenizer.padding_side = 'left')"
            )
        q_length = self.q_length
        past, new = tokens[:, : tokens.shape[1] - q_length], tokens[:, tokens.shape[1] - q_length :]
        self.stored = past.sum(1)
        if not new.all():
            counts = new.sum(1)
            column = torch.arange(q_length, device=new.device)
            pads = (q_length - counts)[:, None]
            self.counts = counts.to(torch.int32)
            # Columns hold padding first, then tokens; the kernels want a row's tokens first.
            self.to_tokens = ((column + pads) % q_length)[:, :, None, None]
            self.to_columns = ((column - pads) % q_length)[:, :, None, None]
            self.begun = bool(new[:, -1].all())

    def tokens_first(self, x):
        """x [B, T, H, D] in columns -> in tokens."""
        return x if self.counts is None else torch.take_along_dim(x, self.to_tokens, 1)

    def columns(self, x):
        return x if self.counts is None else torch.take_along_dim(x, self.to_columns, 1)


def _window_of(mask_function):
    """None for the plain causal mask, W for a causal sliding window; every other mask is refused."""
    if mask_function is causal_mask_function:
        return None
    # transformers builds a sliding window as and_masks(sliding_window_overlay(W), causal_mask_function): closures.
    if getattr(mask_function, "__code__", None) is _AND_CODE:
        parts = mask_function.__closure__[0].cell_contents
        if len(parts) == 2 and getattr(parts[0], "__code__", None) is _WINDOW_CODE and parts[1] is causal_mask_function:
            return parts[0].__closure__[0].cell_contents
    raise NotSupportedError(
        "attention_mask: the attention function 'rooftile' has causal masks, with or without a sliding window, and "
        f"left padding; this model asks for {getattr(mask_function, '__qualname__', mask_function)} (packed sequences, "
        "chunked, bidirectional and custom masks are not implemented)"
    )


_AND_CODE = and_masks(causal_mask_function).__code__
_WINDOW_CODE = sliding_window_causal_mask_function(1).__closure__[0].cell_contents[0].__code__


def rooftile_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=causal_mask_function,
    attention_mask=None,
    **kwargs,
):
    """The mask function of transformers for the attention "rooftile": reads the 2-D attention_mask [B, kv_length].

    Raises ArgumentError for padding behind or between tokens, NotSupportedError for masks other than causal (+ window).
    """
    window = _window_of(mask_function)
    if attention_mask is None:
        return _Mask(window)
    if tuple(attention_mask.shape) != (batch_size, kv_length):
        raise ArgumentError(
            f"attention_mask: expected [batch, columns] = [{batch_size}, {kv_length}] (cached and new columns), "
            f"got {list(attention_mask.shape)}"
        )
    mask = _Mask(window, attention_mask.bool(), q_length)
    if kv_length == q_length or not attention_mask.is_cuda:
        mask.read()
    return mask


def _prompt_on_gpu(q, k, v, counts, *, scale, window, softcap, sinks):
    """Causal self-attention by torch: q [B, T, Hq, D], k, v [B, T, Hkv, D], of each row its first counts[b] tokens."""
    for name, value in (("softcap", softcap), ("sinks", sinks)):
        if value is not None:
            raise NotSupportedError(
                f"{name}: on a GPU prompts run on torch's scaled_dot_product_attention, which has none; "
                "RooftileCache(..., stepwise=True) reads them with the decode kernels instead"
            )
    length = q.shape[1]
    position = torch.arange(length, device=q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # a row's tokens come first, so that the causal mask hides its padding
    if window is None or window >= length:
        seen = {"is_causal": True, "enable_gqa": q.shape[1] != k.shape[1]}
    else:
        distance = position[:, None] - position
        seen = {"attn_mask": (distance >= 0) & (distance < window)}
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, **seen).transpose(1, 2)
    return out if counts is None else out.masked_fill((position >= counts[:, None])[:, :, None, None], 0)


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
    torch's scaled_dot_product_attention.
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
    if is_causal is False or not getattr(module, "is_causal", True):
        raise NotSupportedError("is_causal: the attention function 'rooftile' is causal self-attention only")
    if attention_mask is None:
        attention_mask = _Mask(sliding_window)
    elif type(attention_mask) is not _Mask:
        raise NotSupportedError(
            f"attention_mask: expected the 2-D padding mask [batch, columns]; a mask of shape "
            f"{list(attention_mask.shape)} is not implemented by the attention function 'rooftile'"
        )
    attention_mask = attention_mask.on(query.device)
    options = {"scale": scaling, "window": attention_mask.window, "softcap": softcap, "sinks": s_aux}
    if type(key) is _NewTokens:
        return key.layer.attend(query, key, attention_mask, options), None
    if key.shape[2] != query.shape[2]:
        raise NotSupportedError(
            f"past_key_values: the attention function 'rooftile' works with RooftileCache(model.config) or without a "
            f"cache (use_cache=False); got {key.shape[2]} keys for {query.shape[2]} queries from another cache"
        )
    q, k, v = (attention_mask.tokens_first(x.transpose(1, 2)) for x in (query, key, value))
    if q.is_cuda:
        out = _prompt_on_gpu(q, k, v, attention_mask.counts, **options)
    else:
        out = rt.prefill_attention(q, k, v, counts=attention_mask.counts, **options)
    return attention_mask.columns(out), None


class _Contradiction:
    """Whether a mask contradicted the cache on a GPU, which the host learns without waiting for it."""

    def __init__(self, device):
        with torch.inference_mode(False):  # so that forwards in and out of it may write them
            self.found = torch.zeros((), dtype=torch.bool, device=device)
            self.seen = torch.zeros((), dtype=torch.bool).pin_memory()

    def add(self, found):
        self.found |= found
        self.seen.copy_(self.found, non_blocking=True)

    def __deepcopy__(self, memo):  # a copied tensor would not be pinned
        return _Contradiction(self.found.device)


class RooftileLayer(CacheLayerMixin):
    """One layer of a RooftileCache: an rt.KVCache that is made at first use and grows."""

    is_sliding = False
    is_compileable = False

    def __init__(self, format, capacity=None, dtype=None, stepwise=False):
        super().__init__()
        self.format, self.capacity, self.dtype, self.stepwise = format, capacity, dtype, stepwise
        self.cache = None  # rt.KVCache
        self.columns = 0  # what transformers calls the sequence length: tokens and padding
        self.padded = False  # whether a row has padding, and so fewer tokens than columns
        self.begun = False  # whether every row has a token
        self.contradiction = None  # _Contradiction, of steps on a GPU
        self.held = None  # _NewTokens between update() and the attention function

    @property
    def is_croppable(self):
        return not self.format.startswith("int4-kivi")

    @property
    def batch_size(self):
        return self.cache.batch if self.cache is not None else -1

    def lazy_initialization(self, key_states, value_states):
        batch, kv_heads, tokens, head_dim = key_states.shape
        self.cache = rt.KVCache(
            batch,
            self.capacity or tokens + HEADROOM,
            kv_heads,
            head_dim,
            format=self.format,
            dtype=self.dtype or key_states.dtype,
            device=key_states.device,
        )
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Holds the new keys and values [B, Hkv, T, D] for the attention function; returns a handle to them, twice."""
        self._settled()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.cache.batch:
            raise ArgumentError(
                f"past_key_values: this RooftileCache holds {self.cache.batch} rows, the input has "
                f"{key_states.shape[0]}; call reset() or use a new cache"
            )
        self.columns += key_states.shape[2]
        self.held = _NewTokens(self, key_states, value_states)
        return self.held, self.held

    def attend(self, query, new, mask, options):
        """query [B, Hq, T, D] against the cache and the held tokens, which are stored: [B, T, Hq, D]."""
        if new is not self.held:
            raise ArgumentError("key: these keys and values were stored already; every update() is attended once")
        length = new.key.shape[2]
        before = self.columns - length
        self._check_mask(mask, before)
        q = mask.tokens_first(query.transpose(1, 2))
        k = mask.tokens_first(new.key.transpose(1, 2))
        v = mask.tokens_first(new.value.transpose(1, 2))
        if self.columns > self.cache.capacity:
            self.cache = self.cache.select(capacity=max(2 * self.cache.capacity, self.columns))
        if self.stepwise or (before and (length <= SHORT or query.is_cuda)):
            out = self._store_and_attend(q, k, v, mask.counts, options)
        else:
            if query.is_cuda:
                out = _prompt_on_gpu(q, k, v, mask.counts, **options)
            else:
                past = self.cache if before else None
                out = rt.prefill_attention(q, k, v, cache=past, counts=mask.counts, **options)
            self.cache.append(k, v, counts=mask.counts)
        self.held = None
        return mask.columns(out)

    def _store_and_attend(self, q, k, v, counts, options):
        """The new tokens as decode steps see them; on a GPU, where decode kernels are for a few tokens, in pieces."""
        length = q.shape[1]
        size = SHORT if q.is_cuda else max(length, 1)
        outs = []
        for begin in range(0, max(length, 1), size):
            piece = slice(begin, begin + size)
            real = counts if size >= length or counts is None else (counts - begin).clamp(0, size)
            self.cache.append(k[:, piece], v[:, piece], counts=real)
            outs.append(rt.decode_attention(q[:, piece], self.cache, counts=real, **options))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _check_mask(self, mask, before):
        """The mask and the cache must agree on how many tokens each row holds."""
        if mask.tokens is not None and self.begun:
            if not mask.compared:
                self._compare_later(mask)
            return
        mask.read()
        if mask.stored is not None or self.padded:
            held = self.cache.seq_lens
            told = torch.full_like(held, before) if mask.stored is None else mask.stored
            if (told != held).any():
                row = int((told != held).nonzero()[0])
                raise ArgumentError(
                    f"attention_mask: it says that row {row} has {int(told[row])} tokens in the cache, the cache holds "
                    f"{int(held[row])}; pass the mask of all columns, cached and new, as it was for the earlier ones"
                )
        self.padded, self.begun = mask.stored is not None, mask.begun

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
            raise NotSupportedError(
                "past_key_values: the tokens of an earlier forward were not stored, because it stopped half way or ran "
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
        self.columns = 0
        self.padded = self.begun = False
        self.is_initialized = False

    def offload(self):
        raise NotSupportedError("offloading: a RooftileCache stays on its device")

    prefetch = offload

    def reorder_cache(self, beam_idx):
        self._settled()
        if self.cache is not None:
            self.cache.reorder(beam_idx.tolist())

    def batch_select_indices(self, indices):
        self._settled()
        if self.cache is not None:
            self.cache = self.cache.select(indices.tolist())

    def batch_repeat_interleave(self, repeats):
        self.batch_select_indices(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove):
        """Takes back the newest -tokens_to_remove columns; a positive value is the length to keep (before 5.18).

        Raises ArgumentError where the format cannot: kivi formats take back 16 tokens, or go to a multiple of 32.
        """
        self._settled()
        keep = self.columns + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.columns)
        keep = max(keep, 0)
        if self.cache is None or keep == self.columns:
            return
        tokens = [max(length - (self.columns - keep), 0) for length in self.cache.lengths]
        try:
            self.cache.truncate(list(range(self.cache.batch)), tokens)
        except ArgumentError as e:
            raise ArgumentError(
                f"past_key_values: {e} (assisted generation takes back what it proposed in vain: with kivi formats set "
                "num_assistant_tokens, or prompt_lookup_num_tokens, to 16 or less)"
            ) from None
        self.begun = all(tokens)
        self.columns = keep


class RooftileCache(Cache):
    """A KV cache of transformers in any rooftile format; goes in as `past_key_values`.

    config: the model's config. format: one name for all layers, or {"default": name, layer: name}, as rt.ModelKVCache
    takes it; see docs/guide/cache-formats.md. capacity: tokens to make room for at once; the cache grows beyond it by
    doubling, which copies it. dtype: of the keys and values, default that of the first ones. stepwise: a forward over T
    tokens gives what T forwards over one token give (its tokens are stored before they are attended), which is how text
    is scored under a compressed cache; kivi formats then take at most 32 tokens per forward.

        cache = RooftileCache(model.config, format="int4-kivi")
        model.generate(**inputs, past_key_values=cache)          # cache.nbytes, cache.layers[i].cache (an rt.KVCache)

    Raises ArgumentError or ArgumentTypeError for a wrong format or capacity, NotSupportedError for models with layers
    that are not plain attention.
    """

    def __init__(self, config, *, format="int4-kivi", capacity=None, dtype=None, stepwise=False):
        text = config.get_text_config(decoder=True)
        odd = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
        if odd or getattr(text, "num_kv_shared_layers", 0):
            raise NotSupportedError(
                f"config: RooftileCache has full and sliding attention layers, each with its own keys; this model has "
                f"{', '.join(odd) or 'layers that share keys'}"
            )
        if capacity is not None and (not isinstance(capacity, int) or capacity < 1):
            raise ArgumentError(f"capacity: expected a positive number of tokens or None, got {capacity!r}")
        # without rows: what each layer's format is, and a wrong one is refused here, not in the first forward
        empty = rt.ModelKVCache(text.num_hidden_layers, 0, 1, 1, 1, format=format)
        super().__init__(layers=[RooftileLayer(layer.format, capacity, dtype, stepwise) for layer in empty])

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        layer = self.layers[layer_idx]
        held = layer.update(key_states, value_states)
        if layer_idx and layer.columns != self.layers[layer_idx - 1].columns:
            raise ArgumentError(
                f"past_key_values: layer {layer_idx} would hold {layer.columns} columns, the layer before it "
                f"{self.layers[layer_idx - 1].columns}: an earlier forward stopped half way; reset() this cache"
            )
        return held

    def _checked(self, op):
        """Raises what is wrong with any layer before the first one changes."""
        for layer in self.layers:
            layer._settled()
            if layer.cache is not None:
                layer.cache.check(op)

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
        # kivi layers, which may refuse, come first; they hold the same tokens, so that the first speaks for all
        for layer in sorted(self.layers, key=lambda layer: layer.is_croppable):
            layer.crop(tokens_to_remove)

    @property
    def nbytes(self):
        """Bytes allocated for all layers: codes, scales, raw rings."""
        return sum(layer.cache.nbytes for layer in self.layers if layer.cache is not None)


AttentionInterface.register("rooftile", rooftile_attention)
AttentionMaskInterface.register("rooftile", rooftile_mask)
