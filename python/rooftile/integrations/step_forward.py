# SPDX-License-Identifier: Apache-2.0
"""model.forward of a model that rt.accelerate was called with.

A forward over one new token a row and a RooftileCache is a step of a StepProgram, any other one runs in transformers.
"""

import copy
import functools
import inspect
import sys
import threading
import warnings

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from rooftile.errors import NotSupportedError
from rooftile.integrations import step_loop
from rooftile.integrations._models import CACHE_KEYWORDS, cache_keyword
from rooftile.integrations.step_calls import StepCalls
from rooftile.integrations.step_graph import StepGraph
from rooftile.integrations.step_program import StepProgram
from rooftile.integrations.transformers import RooftileCache

_KEPT = 4  # programs of a model, each of other rows
# What a step that the program takes may be given; what is None or False says nothing.
_KEYWORDS = {
    *("input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep", "return_dict"),
    "tokenizer",  # transformers' loop hands on that of stop strings
    *CACHE_KEYWORDS,
}
_OUTPUT_CACHE = next(name for name in CACHE_KEYWORDS if name in CausalLMOutputWithPast.__dataclass_fields__)


class StepForward:
    """model.forward of a model that rt.accelerate was called with."""

    def __init__(self, model):
        self.model, self._cuda_graphs = model, True
        self._names = ("input_ids", "attention_mask", "position_ids", cache_keyword(model))  # of positional arguments
        self._forget()

    def _forget(self):
        self._programs = {}  # by rows, the latest last
        self._said = set()  # what was said of this model, once
        self._lock = threading.RLock()  # of the programs' buffers; a signal handler may generate, too

    def set_cuda_graphs(self, cuda_graphs):
        """Whether steps on a GPU become CUDA graphs. Another answer than before records programs anew."""
        with self._lock:
            if cuda_graphs != self._cuda_graphs:
                self._cuda_graphs, self._programs = cuda_graphs, {}

    @property
    def __signature__(self):  # generate() asks what the forward takes
        return inspect.signature(type(self.model).forward.__get__(self.model))

    @property
    def __code__(self):  # torch.export asks
        return type(self.model).forward.__code__

    def __deepcopy__(self, memo):
        copied = type(self)(copy.deepcopy(self.model, memo))
        copied.set_cuda_graphs(self._cuda_graphs)
        return copied

    def __getstate__(self):
        return {name: vars(self)[name] for name in ("model", "_names", "_cuda_graphs")}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._forget()

    def __call__(self, *args, **kwargs):
        if not torch.compiler.is_compiling():
            step = self._step_of(args, kwargs)
            if step is not None:
                return step
            kwargs = _without_gaps(args, kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    def _step_of(self, args, kwargs):
        """The output of a decode step over a RooftileCache, or None for any other forward."""
        given = dict(zip(self._names, args, strict=False))
        given.update((name, value) for name, value in kwargs.items() if value is not None and value is not False)
        cache = next((given[name] for name in CACHE_KEYWORDS if name in given), None)
        if type(cache) is not RooftileCache or len(args) > 4 or not given.keys() <= _KEYWORDS:
            return None
        if kwargs.get("use_cache") is False or kwargs.get("return_dict") is False or not _plain(self.model.config):
            return None
        kept = given.get("logits_to_keep", 0)
        if not isinstance(kept, int) or kept < 0:
            return None
        logits = self.step(given.get("input_ids"), cache, given)
        if logits is None:
            return None
        return CausalLMOutputWithPast(logits=logits.clone(), **{_OUTPUT_CACHE: cache})

    def step(self, ids, cache, given):
        """Logits [batch, 1, vocabulary] of one token a row, ids int64 [batch, 1], which the cache then holds; the next
        step writes them anew. None where that is no decode step that has a program.

        given: what else the forward is given, by name. None in a loop over tokens, whose first step was a forward: that
        one was compared with the cache and the model; the others look whether memory moved.
        """
        if type(ids) is not torch.Tensor or ids.ndim != 2 or ids.shape[1] != 1:
            return None
        device = ids.device.type
        if torch.is_grad_enabled() or self.model.training or torch.jit.is_tracing():
            return None
        if device not in ("cpu", "cuda") or torch.is_autocast_enabled(device):
            return None
        with self._lock:
            if not cache.may_step(ids) or not (given is None or cache.agrees(given)):
                self._say_slides(cache)
                return None
            program = self._programs.get(ids.shape[0]) if given is None else None
            if program is None or not program.in_place():
                program = None if cache.refused else self._program_for(ids.shape[0])
                cache.refused = program is None
            if program is None or program.device != ids.device:
                return None
            x = program.embed(ids) if device == "cpu" else None  # refuses wrong ids, which a GPU's kernels do
            caches = cache.step_caches(program.new_key, program.windows)
            if caches is None:
                self._say_slides(cache)
                return None
            if cache.calls is None or not cache.calls.fits(program, caches):
                cache.calls = (StepCalls if device == "cpu" else StepGraph)(program, caches)
            logits = cache.calls.run(ids if x is None else x, cache.begin_step)
            cache.end_step()
        return logits

    def loop(self, cache, streamer, keeps_cache):
        """What generate() takes as custom_generate: its loop over tokens with this model's steps, see step_loop."""
        return functools.partial(
            step_loop.decode, forward=self, cache_given=cache, streamer=streamer, keeps_cache=keeps_cache
        )

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
            return StepProgram(self.model, batch, self._cuda_graphs)
        except NotSupportedError as error:
            self.say(f"decode steps run in transformers: {error}")
            return None

    def _say_slides(self, cache):
        if cache.slides:
            self.say("decode steps run in transformers where the window of a layer slides")

    def say(self, text):
        """A warning, once a model."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(f"rooftile: {text}", stacklevel=_level_of_user())


def _without_gaps(args, kwargs):
    """kwargs of a prompt on the CPU, its last tokens named one by one: so indexed, their states have their own memory.

    transformers slices them otherwise, and for a slice whose strides are the prompt's, torch's matmul copies the whole
    weight of the head.
    """
    ids, kept = args[0] if args else kwargs.get("input_ids"), kwargs.get("logits_to_keep")
    if type(kept) is not int or type(ids) is not torch.Tensor or ids.ndim != 2 or not 0 < kept < ids.shape[1]:
        return kwargs
    if ids.device.type != "cpu":
        return kwargs
    return {**kwargs, "logits_to_keep": torch.arange(ids.shape[1] - kept, ids.shape[1], device=ids.device)}


def _level_of_user():
    """The stacklevel with which a warning of the caller names the line of the user that led to it."""
    level, frame, between = 1, sys._getframe(1), ("rooftile", "torch", "transformers")
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in between:
        level, frame = level + 1, frame.f_back
    return level


def _plain(config):
    """Whether a forward of this config gives logits and a cache alone, in an object."""
    asks = ("output_attentions", "output_hidden_states")
    return not any(getattr(config, name, False) for name in asks) and getattr(config, "return_dict", True) is not False
