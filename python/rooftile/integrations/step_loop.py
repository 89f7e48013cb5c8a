# SPDX-License-Identifier: Apache-2.0
"""generate()'s loop over tokens where steps are those of a StepProgram: greedy or sampled, one text a row.

transformers' loop begins: it runs the prompt and the first step, whose mask and positions are compared with the cache.
This one goes on with the same stopping criteria, and with sample() in place of those logits processors that it stands
for. Between two steps there is no more than they ask for; on a GPU the host learns one step late that all rows have
stopped, and takes that step back.
"""

import collections

import torch
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import StoppingCriteriaList

from rooftile.errors import ArgumentError, NotSupportedError
from rooftile.kv_sliding import ring_tokens
from rooftile.sampling import sample

# Logits processors that sample() stands for, in its order: its argument, and where the processor has the value.
_SAMPLED = {
    logits_process.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    logits_process.TemperatureLogitsWarper: ("temperature", "temperature"),
    logits_process.TopKLogitsWarper: ("top_k", "top_k"),
    logits_process.TopPLogitsWarper: ("top_p", "top_p"),
    logits_process.MinPLogitsWarper: ("min_p", "min_p"),
}
_TAKEN = {"temperature": (1e-6, 100), "repetition_penalty": (1e-6, 1e6)}  # the least and the most for sample()
_ROOM = 4096  # tokens behind the prompt for which a new cache makes room at once
# Settings of generate() with which it is another loop, or returns more than tokens.
_OTHER_LOOPS = (
    *("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha", "dola_layers"),
    *("constraints", "force_words_ids", "num_beam_groups", "prefill_chunk_size", "return_dict_in_generate"),
    *("synced_gpus", "custom_generate", "inputs_embeds", "token_healing", "use_mtp"),
    "stop_strings",  # last: what names nothing else takes a criterion in its place
)


def other_loop(setting):
    """The first of generate()'s settings, a function of their names, that asks for another loop or result; or None."""
    if setting("num_beams") not in (None, 1):
        return "num_beams"
    return next((name for name in _OTHER_LOOPS if setting(name) is not None and setting(name) is not False), None)


class _FirstTokens(StoppingCriteriaList):
    """The call's criteria, which also stop transformers' loop when a step of the program was taken."""

    def __init__(self, criteria, cache):
        super().__init__(criteria)
        self.cache, self.steps = cache, cache.steps
        self.unfinished = None  # [batch], rows that go on

    def __call__(self, input_ids, scores, **kwargs):
        finished = super().__call__(input_ids, scores, **kwargs)
        self.unfinished = ~finished if self.unfinished is None else self.unfinished & ~finished
        return torch.ones_like(finished) if self.steps_follow() else finished

    def steps_follow(self):
        """Whether this loop ends here for ours. Layers that will slide leave the program."""
        if self.cache.steps == self.steps:
            return False
        windows = [layer.window for layer in self.cache.layers if layer.window is not None]
        return not windows or (self.max_length is not None and self.max_length <= ring_tokens(min(windows)))


def _arguments_of(processors):
    """The arguments of sample() that do what a list of logits processors does, or None where it does more."""
    known = list(_SAMPLED)
    places = [known.index(type(p)) if type(p) in known else -1 for p in processors]
    if -1 in places or places != sorted(set(places)):
        return None
    arguments = {_SAMPLED[type(p)][0]: getattr(p, _SAMPLED[type(p)][1]) for p in processors}
    plain = all(
        getattr(p, "filter_value", -float("inf")) == -float("inf")
        and getattr(p, "prompt_ignore_length", None) is None
        and ("top_k" in _SAMPLED[type(p)] or getattr(p, "min_tokens_to_keep", 1) == 1)  # top_k has it in its value
        for p in processors
    )
    taken = all(least <= arguments.get(name, 1) <= most for name, (least, most) in _TAKEN.items())
    return arguments if plain and taken else None


class _NextTokens:
    """Tokens [batch] from a step's logits: by sample() where it does what the processors do, else by them and torch."""

    def __init__(self, ids, processors, do_sample):
        self.processors, self.do_sample = processors, do_sample
        self.arguments = _arguments_of(processors)
        if self.arguments is None:
            return
        if not do_sample:
            self.arguments["temperature"] = 0
            return
        of_rows = {"device": ids.device, "dtype": torch.int64}
        self.arguments["seeds"] = torch.randint(2**63 - 1, (len(ids),), **of_rows)
        self.arguments["positions"] = torch.full((len(ids),), ids.shape[1], **of_rows)

    def __call__(self, ids, logits):
        if self.arguments is None:
            scores = self.processors(ids, logits.to(copy=True, dtype=torch.float32))
            if not self.do_sample:
                return sample(scores, temperature=0)
            return torch.multinomial(torch.nn.functional.softmax(scores, -1), 1)[:, 0]
        tokens = sample(logits, token_ids=ids if "repetition_penalty" in self.arguments else None, **self.arguments)
        if self.do_sample:
            self.arguments["positions"] += 1
            if not ids.is_cuda and bool((tokens < 0).any()):
                raise ArgumentError(
                    "generate: the model's logits leave nothing to draw from: they have NaN or +inf, or are all -inf"
                )
        return tokens


class _Tokens:
    """Hands tokens to a streamer, which transformers' loop must not end."""

    def __init__(self, streamer):
        self.put = streamer.put

    def end(self):
        pass


class _Stops:
    """Says after each token whether all rows have stopped: on a GPU one token late, when the host need not wait."""

    def __init__(self, ids, streamer, most):
        """most: the tokens with which every text ends, or None."""
        self.late, self.streamer, self.most = ids.is_cuda, streamer, most
        self.pending = collections.deque()
        if self.late:
            pinned = {"device": "cpu", "pin_memory": True}
            self.free = collections.deque(
                (torch.zeros((), dtype=torch.bool, **pinned), torch.zeros(len(ids), dtype=ids.dtype, **pinned),
                 torch.cuda.Event())
                for _ in range(2)
            )  # fmt: skip

    def __call__(self, unfinished, tokens, length):
        """How many of the newest tokens came after the last one, or None to go on."""
        if not self.late:
            self._put(tokens)
            return None if bool(unfinished.any()) else 0
        go_on, on_host, copied = slot = self.free.popleft()
        go_on.copy_(unfinished.any(), non_blocking=True)
        if self.streamer is not None:
            on_host.copy_(tokens, non_blocking=True)
        copied.record()
        self.pending.append(slot)
        while len(self.pending) > (length != self.most):  # one token stays behind, but for the last
            go_on, on_host, copied = slot = self.pending.popleft()
            self.free.append(slot)
            copied.synchronize()
            self._put(on_host.clone())
            if not go_on:
                return len(self.pending)
        return None

    def _put(self, tokens):
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())


def decode(
    model,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    *,
    forward,
    cache_given,
    streamer=None,
    keeps_cache=True,
    **model_kwargs,
):
    """transformers' decoding method (custom_generate of generate()): ids [batch, tokens] with the new ones.

    forward: the model's StepForward. cache_given: the RooftileCache of the call. keeps_cache: whether the caller has
    it, too.
    """
    room = input_ids.shape[1] + _ROOM
    if not cache_given.get_seq_length():
        last = room if stopping_criteria.max_length is None else stopping_criteria.max_length - 1  # it is not stored
        cache_given.make_room(min(last, room))
    first = _FirstTokens(stopping_criteria, cache_given)
    ids = type(model)._sample(
        model,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=first,
        generation_config=generation_config,
        streamer=None if streamer is None else _Tokens(streamer),
        **model_kwargs,
    )
    if first.steps_follow() and bool(first.unfinished.any()):
        ids = _steps(ids, first.unfinished, logits_processor, stopping_criteria, generation_config, forward,
                     cache_given, streamer, keeps_cache)  # fmt: skip
    if streamer is not None:
        streamer.end()
    return ids


def _steps(ids, unfinished, logits_processor, stopping_criteria, config, forward, cache, streamer, keeps_cache):
    pad = config._pad_token_tensor if any(hasattr(c, "eos_token_id") for c in stopping_criteria) else None
    pad = None if pad is None else pad.to(ids.device)
    stops = _Stops(ids, streamer, stopping_criteria.max_length)
    next_tokens = _NextTokens(ids, logits_processor, config.do_sample)
    while True:
        logits = forward.step(ids[:, -1:], cache, None)
        if logits is None:
            raise NotSupportedError(
                "generate: between two tokens this model lost the program of its decode steps: a logits processor, a "
                "stopping criterion, a streamer or another thread changed the model, its cache or a mode of torch"
            )
        tokens = next_tokens(ids, logits[:, -1])
        if pad is not None:
            tokens = torch.where(unfinished, tokens, pad)
        ids = torch.cat([ids, tokens[:, None]], 1)
        unfinished = unfinished & ~stopping_criteria(ids, None)
        behind = stops(unfinished, tokens, ids.shape[1])
        if behind is not None:
            if behind and keeps_cache:
                cache.crop(-behind)
            return ids[:, : ids.shape[1] - behind].contiguous()
