# SPDX-License-Identifier: Apache-2.0
"""How much a KV-cache format or a weight format costs: perplexity, its paired difference, KL and top-1 agreement.

The protocol. Text is cut into chunks of equal length that do not overlap. Every chunk is scored by itself,
teacher-forced, nothing in front of it; its first token is not scored. Perplexity = exp(mean NLL over all scored
tokens), natural logarithms, log-softmax in fp32. Differences to the first variant are paired by chunk, their standard
error is taken over chunks; KL is KL(first variant || variant), averaged over scored tokens.
"""

import dataclasses
import math

import numpy as np

from rooftile._arrays import check_flag, refuse_mask
from rooftile._progress import progress_bar
from rooftile.errors import ArgumentError

# The first variant's log-probabilities stay in memory for one batch of chunks: about this much, at least one chunk's.
_BATCH_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way of running a causal language model of transformers.

    make_cache(batch): a new cache for `batch` chunks, given to the model's forward; None: no cache.
    step: None runs a chunk in one forward; otherwise blocks of `step` tokens from position 0 on, one forward each. With
    step=32 and RooftileCache(..., stepwise=True) a compressed cache is read exactly as in token-by-token decoding.
    attention: name of the attention implementation to set on the model, None: as it is.
    """

    name: str
    model: object
    make_cache: object = None
    step: int | None = None
    attention: str | None = None


@dataclasses.dataclass(frozen=True)
class Score:
    """What one variant got. nll, kl, top1: float64 [chunks], each the mean over a chunk's scored tokens."""

    name: str
    nll: np.ndarray
    kl: np.ndarray
    top1: np.ndarray

    @property
    def perplexity(self):
        return math.exp(self.nll.mean())

    def difference(self, baseline):
        """Mean NLL minus `baseline`'s (another Score of the same chunks) and its standard error over chunks, in nats.

        The standard error of one chunk is nan.
        """
        d = self.nll - baseline.nll
        return float(d.mean()), float(d.std(ddof=1) / math.sqrt(len(d))) if len(d) > 1 else math.nan


def split_chunks(ids, length, count=None):
    """Chunks of `length` tokens out of the token ids of a text: int64 [count, length], spread evenly, not overlapping.

    count: None takes all whole chunks. Raises ArgumentError when there are fewer.
    """
    refuse_mask("split_chunks", "ids", ids)
    ids = np.asarray(ids, dtype=np.int64)
    whole = len(ids) // length
    count = whole if count is None else count
    if not 1 <= count <= whole:
        raise ArgumentError(f"chunks: the text has {len(ids)} tokens, {whole} chunks of {length}; asked for {count}")
    starts = np.arange(count) * whole // count * length
    return np.stack([ids[start : start + length] for start in starts])


def compare(variants, chunks, *, batch=None, progress=True):
    """Scores every variant on the same chunks; the first one is the baseline. Returns one Score per variant.

    chunks: token ids [chunks, tokens], at least 2 tokens each; every model gets them on its device. batch: chunks per
    forward, default as many as keep the baseline's log-probabilities (fp32 [batch, tokens, vocabulary], held for one
    batch) within 256 MiB. All variants run batch by batch, so that memory does not grow with the text.
    progress: a bar on stderr, or lines where that is no terminal.
    """
    check_flag("compare", "progress", progress)
    import torch

    variants = list(variants)
    refuse_mask("compare", "chunks", chunks)
    chunks = torch.as_tensor(np.asarray(chunks), device="cpu")
    if not variants:
        raise ArgumentError("variants: expected at least one, the baseline")
    if chunks.ndim != 2 or len(chunks) == 0 or chunks.shape[1] < 2 or chunks.dtype != torch.int64:
        raise ArgumentError(
            f"chunks: expected integer token ids [chunks, tokens >= 2], got {chunks.dtype} {list(chunks.shape)}"
        )
    for v in variants:
        vocabulary = v.model.config.vocab_size
        if int(chunks.min()) < 0 or int(chunks.max()) >= vocabulary:
            raise ArgumentError(
                f"chunks: token ids from {int(chunks.min())} to {int(chunks.max())}, but the model of '{v.name}' has "
                f"the tokens 0 to {vocabulary - 1}"
            )
        if v.step is not None and v.step < 1:
            raise ArgumentError(f"step: expected a number of tokens >= 1 or None, got {v.step} ('{v.name}')")
        if v.step is not None and v.make_cache is None:
            raise ArgumentError(f"step: blocks of {v.step} tokens need make_cache ('{v.name}')")
    if batch is None:
        batch = max(1, _BATCH_BYTES // (4 * chunks.shape[1] * variants[0].model.config.vocab_size))
    elif batch < 1:
        raise ArgumentError(f"batch: expected a number of chunks >= 1, got {batch}")

    sums = np.zeros((len(variants), 3, len(chunks)))
    with (
        torch.inference_mode(),
        progress_bar("Scoring", len(variants) * chunks.numel(), show=progress) as advance,
    ):
        for start in range(0, len(chunks), batch):
            ids = chunks[start : start + batch]
            baseline = None
            for i, variant in enumerate(variants):
                kept = [] if i == 0 else None
                sums[i, :, start : start + batch] = _score_batch(variant, ids, baseline, kept, advance)
                if i == 0:
                    baseline = torch.cat(kept, 1)
    means = sums / (chunks.shape[1] - 1)
    return [Score(v.name, *means[i]) for i, v in enumerate(variants)]


def _score_batch(variant, ids, baseline, kept, advance):
    """Sums over the scored tokens of every chunk of NLL, KL and top-1 agreement: float64 [3, batch].

    baseline: log-probabilities [batch, tokens - 1, vocabulary] of the baseline; None while it is itself being scored,
    when its blocks of log-probabilities are appended to `kept`.
    """
    import torch

    from rooftile.integrations._models import cache_keyword

    model, (rows, length) = variant.model, ids.shape
    ids = ids.to(model.device)
    if variant.attention is not None:
        model.set_attn_implementation(variant.attention)
    cache = variant.make_cache(rows) if variant.make_cache is not None else None
    keyword, step = cache_keyword(model), variant.step or length
    sums = torch.zeros(3, rows, dtype=torch.float64, device="cpu")
    for begin in range(0, length, step):
        end = min(begin + step, length)
        out = model(ids[:, begin:end], **{keyword: cache}, use_cache=cache is not None)
        scored = min(end, length - 1)  # the last token's prediction has nothing to be compared with
        if scored > begin:
            logp = out.logits[:, : scored - begin].float().log_softmax(-1)
            del out
            nll = -logp.gather(-1, ids[:, begin + 1 : scored + 1, None])[..., 0]
            sums[0] += nll.sum(1, dtype=torch.float64).cpu()
            if baseline is None:
                kept.append(logp)
                sums[2] += scored - begin
            else:
                p = baseline[:, begin:scored]
                sums[2] += (p.argmax(-1) == logp.argmax(-1)).sum(1).cpu()
                # exp(p) * (p - q), in place: the block is as large as the logits
                kl = logp.sub_(p).neg_().mul_(p.exp()).sum(-1, dtype=torch.float64)
                sums[1] += kl.sum(1).cpu()
        advance(rows * (end - begin))
    return sums.numpy()
