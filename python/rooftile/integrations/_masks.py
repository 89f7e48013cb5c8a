# SPDX-License-Identifier: Apache-2.0
"""The mask function of transformers for the attention "rooftile": padding and a window instead of a 4-D mask."""

import copy

import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from rooftile.errors import ArgumentError, NotSupportedError


class Mask:
    """Which columns are padding and how far a query looks back: what the attention function gets as attention_mask.

    Over a RooftileCache, and where is_causal(), attention takes `window`, `counts` and so on, known after
    read_causal(). Everything else is attended as a tensor, dense().

    tokens: bool [B, columns], what is not padding; None once it was read (or where no mask was given).
    Known after read(): stored: int64 [B], tokens of each row in the columns before the new ones, None when no column at
    all is padding. counts: int32 [B], tokens of each row among the new columns, None when all of them are tokens.
    begun: whether every row has a token by now, so that later columns cannot be padding. pads: padding of each row, a
    list, None when there is none.
    behind: whether read() found padding behind a token.
    compared: whether a cache compares `tokens` with itself on the device, which makes reading them needless.
    """

    _ARRAYS = ("tokens", "stored", "counts", "to_tokens", "to_columns")
    __slots__ = (
        *_ARRAYS,
        "arguments",
        "begun",
        "behind",
        "causal",
        "compared",
        "copies",
        "device",
        "other",
        "pads",
        "q_length",
        "whole",
        "window",
    )

    def __init__(self, arguments=None, window=None):
        """arguments: of sdpa_mask; None: no padding and this window."""
        self.arguments, self.window = arguments, window
        self.tokens = self.stored = self.counts = self.to_tokens = self.to_columns = None
        self.whole = None  # dense(), once made
        self.other = None  # not is_causal(), once asked
        self.q_length = arguments["q_length"] if arguments else 0
        self.causal = arguments is None  # read_causal() has run
        self.begun, self.compared, self.pads = True, False, None
        self.behind = False
        self.device, self.copies = None, {}

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

    def dense(self):
        """The bool tensor [B, 1, queries, keys] that transformers makes for its own sdpa; None: not known."""
        if self.whole is None and self.arguments is not None:
            self.whole = sdpa_mask(**self.arguments, allow_is_causal_skip=False)
        return self.whole

    ndim = 4  # of the tensor it stands for; transformers below 5.20 asks, and makes a mask of a mask for static caches

    def contiguous(self):
        """transformers asks this of masks for static caches, which are attended as tensors."""
        return self.dense()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSupportedError(
            f"attention_mask: this model reads the mask itself (.{name}), which the attention function 'rooftile' "
            "keeps as padding and a window; use 'sdpa' or 'eager'"
        )

    def __getitem__(self, index):
        return self.__getattr__("[]")

    def traced_window(self, sliding_window):
        """read_causal's window where torch.compile traces, which sees no closures: the layer says how far it looks."""
        function = self.arguments["mask_function"]
        if function is causal_mask_function:
            return None
        if sliding_window is None or function.__name__ != and_masks(causal_mask_function).__name__:
            raise NotSupportedError(_OTHER_MASK.format(function.__name__))
        return sliding_window

    @classmethod
    def causal_of(cls, tokens, q_length, window):
        """A mask that was taken apart: tokens bool [B, columns] or None."""
        mask = cls(window=window)
        if tokens is not None:
            mask.q_length = q_length
            mask._take(tokens)
        return mask

    def _take(self, tokens):
        self.tokens, self.device = tokens.bool(), tokens.device
        if tokens.shape[1] == self.q_length or not tokens.is_cuda:
            self.read()

    def is_causal(self):
        """Of a prompt, whether read_causal() takes its mask; if not it is attended as dense()."""
        if self.other is None:
            if not self.causal:
                self._check_shape(self.q_length)
            try:
                self.read_causal()
                self.other = False
            except NotSupportedError:
                self.other = True
            except ArgumentError:
                if not self.behind:
                    raise
                self.other = True
        return not self.other

    def read_causal(self):
        """Finds the window and the padding. Raises ArgumentError, or NotSupportedError for masks other than causal."""
        if self.causal:
            return
        given = self.arguments
        self.window = _window_of(given["mask_function"])
        self._check_shape(given["kv_length"])
        if given["attention_mask"] is not None:
            self._take(given["attention_mask"])
        self.causal = True

    def _check_shape(self, columns):
        tokens, batch = self.arguments["attention_mask"], self.arguments["batch_size"]
        if tokens is None or tuple(tokens.shape) == (batch, columns):
            return
        again = "; with use_cache=False generate() passes no cached ones: give it a cache, or use_cache=False, not both"
        raise ArgumentError(
            f"attention_mask: expected [batch, columns] = [{batch}, {columns}] (cached and new columns), "
            f"got {list(tokens.shape)}{again if tokens.shape[1] == self.q_length else ''}"
        )

    def read(self):
        """Looks at the columns, for which a GPU is waited for. Raises ArgumentError for padding behind a token."""
        tokens, self.tokens = self.tokens, None
        if tokens is None or tokens.all():
            return
        after = tokens[:, :-1] & ~tokens[:, 1:]
        if after.any():
            row, column = after.nonzero()[0].tolist()
            self.behind = True
            raise ArgumentError(
                f"attention_mask: row {row} has padding at column {column + 1}, behind a token; a RooftileCache takes "
                "padding on the left only (tokenizer.padding_side = 'left'; or use_cache=False, to score texts)"
            )
        q_length = self.q_length
        past, new = tokens[:, : tokens.shape[1] - q_length], tokens[:, tokens.shape[1] - q_length :]
        self.stored = past.sum(1)
        self.pads = (~tokens).sum(1).tolist()
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
    raise NotSupportedError(_OTHER_MASK.format(getattr(mask_function, "__qualname__", mask_function)))


_OTHER_MASK = (
    "attention_mask: a RooftileCache has causal masks, with or without a sliding window, and left padding; this model "
    "asks for {} (packed sequences, chunked, bidirectional and custom masks are not implemented)"
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
    use_vmap=False,
    device="cpu",
    **kwargs,
):
    """The mask function of transformers for the attention "rooftile": keeps the 2-D attention_mask [B, kv_length].

    What is wrong with a mask is raised by the first layer, once it is known which cache it is for.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    if isinstance(q_offset, torch.Tensor):  # a static cache's own length, which it adds to before the mask is needed
        q_offset = q_offset.clone()
    return Mask(
        {
            "batch_size": batch_size,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": mask_function,
            "attention_mask": attention_mask,
            "use_vmap": use_vmap,
            "device": device,
        }
    )
