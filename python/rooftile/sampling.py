# SPDX-License-Identifier: Apache-2.0
"""The next token from logits."""

from rooftile import _C
from rooftile._arrays import empty, shape_of
from rooftile._calls import compiling, needs_torch_stream, on_stream, ran, torch_op
from rooftile._registry import OPS, Op


def sample(
    logits,
    *,
    temperature=1.0,
    top_k=None,
    top_p=None,
    min_p=None,
    repetition_penalty=None,
    token_ids=None,
    seeds=None,
    positions=None,
    order="transformers",
    out=None,
    stream=None,
    plan=None,
):
    """The next token of each row, drawn from the softmax of its logits or, with temperature 0, the likeliest one.

    logits: [..., vocabulary], float16, bfloat16 or float32, on a GPU too; at most 2^22 tokens, and where a GPU draws
    2^21 (Hopper) or 2^18. Settings, in this order:
      repetition_penalty: positive; divides positive logits of the tokens in token_ids and multiplies negative ones
        (Keskar et al. 2019, arXiv 1909.05858). token_ids: [..., any], int32 or int64; entries that are no tokens, as
        -1, count as padding.
      temperature: divides the logits; 0, or 1e-6 to 100. 0 takes the first of the largest logits, as argmax. Logits
        that differ by less than 1.5e-8 of the temperature count as equal.
      top_k: the likeliest tokens, with all that equal the last of them (Fan et al. 2018, arXiv 1805.04833).
      top_p: the fewest likeliest tokens with this part of the probability, in [0, 1]; at least one, and of equal ones
        the first (Holtzman et al. 2019, arXiv 1904.09751).
      min_p: tokens of at least this part of the likeliest one's probability, in [0, 1] (Nguyen et al. 2024, arXiv
        2407.01082).
      order: "transformers": top_p is of what top_k left, and min_p comes last; "vllm": min_p comes before both.
    seeds: [...], int64, one a row; needed unless temperature is 0. positions: [...], int32 or int64, default 0. The
    random bits of a row are a function of its seed and position (Philox4x32-10), so a loop over tokens keeps the seeds
    and counts the positions, such as cache.seq_lens. The same row gets the same token alone and in a batch, on every
    device, whatever the number of threads.
    Returns int64 [...], written to `out` (int64 or int32) when given. A row with NaN or +inf behind the penalty, or
    with -inf only, has no probabilities and gets -1; with temperature 0 NaN is the largest, as in torch.
    """
    if stream is not None and needs_torch_stream(stream, logits):
        return on_stream(sample, logits, locals())
    if compiling():
        tensors, settings = (logits, token_ids, seeds, positions), (temperature, top_k, top_p, min_p)
        return torch_op("sample", (*tensors, *settings, repetition_penalty, order), (out,), stream, plan)
    if out is None:
        shape = shape_of(logits)
        out = None if shape is None else empty("sample", "out", logits, shape[:-1], "int64")
    ran(
        _C.sample(
            *(logits, temperature, top_k, top_p, min_p, repetition_penalty, token_ids, seeds, positions, order),
            *(out, stream, plan),
        )
    )
    return out


def _sample(
    logits, token_ids, seeds, positions, temperature, top_k, top_p, min_p, repetition_penalty, order, **options
):
    return sample(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        token_ids=token_ids,
        seeds=seeds,
        positions=positions,
        order=order,
        **options,
    )


OPS["sample"] = Op(
    "Tensor logits, Tensor? token_ids, Tensor? seeds, Tensor? positions, float temperature, int? top_k, float? top_p, "
    "float? min_p, float? repetition_penalty, str order",
    ("out",),
    _sample,
    lambda logits, *_: [logits.shape[:-1]],
    ("int64", None),
)
