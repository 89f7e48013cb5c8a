# SPDX-License-Identifier: Apache-2.0
"""How a public function is called: on which stream, while torch.compile traces it, and who records the kernels."""

import contextlib
import contextvars
import functools
import itertools
import numbers
import operator
import sys

from rooftile._arrays import copied, torch_of
from rooftile.errors import NotSupportedError

_call = functools.partial.__call__
_recorders = contextvars.ContextVar("rooftile.recorders", default=())  # lists of the blocks around this call


def compiling():
    """Whether torch.compile or torch.export is tracing the caller: ops then go through torch.ops.rooftile."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def refuse_export(op, reason):
    """Raises NotSupportedError where torch.export records the caller, which would hand fake tensors to the host."""
    is_exporting = getattr(sys.modules["torch"].compiler, "is_exporting", None)  # torch 2.7
    if is_exporting is not None and is_exporting():
        raise NotSupportedError(f"{op}: torch.export cannot record this: {reason}")


def torch_op(name, inputs, outputs, stream, plan):
    """What a public function does while it is traced: the same through torch.ops.rooftile."""
    from rooftile import torch_ops  # registers them; torch is there, it is tracing us

    return torch_ops.call(name, inputs, outputs, stream, getattr(plan, "plan", plan))


def torch_store(name, inputs, cache, rows, counts, stream, plan):
    """The same for what stores into a cache."""
    from rooftile import torch_ops

    return torch_ops.store(name, inputs, cache, rows, counts, stream, getattr(plan, "plan", plan))


def needs_torch_stream(stream, like):
    """Whether a call with stream=`stream` goes through on_stream: `like`, its first tensor, is torch's on a GPU.

    Others go straight to the binding, which judges what is no stream.
    """
    if torch_of(like) is None or not like.is_cuda or compiling():
        return False
    return isinstance(stream, numbers.Integral) and 0 <= stream < 2**63


def on_stream(function, like, arguments):
    """function(**arguments) with arguments["stream"] as torch's current stream of `like`'s device.

    Outputs, workspace and what is copied to the device are torch's work on its current stream. Kernels on another one
    would race with it, and their memory be handed out again before they have run. Functions with `stream=` begin with
    it, and are no decorated ones: passing all arguments on once more costs every call 0.2 us.
    """
    import torch

    with torch.cuda.stream(torch.cuda.ExternalStream(int(arguments["stream"]), like.device)):
        return function(**{**arguments, "stream": None})


@contextlib.contextmanager
def record_kernels():
    """Collects the names of the kernels that run inside the block, in order: `with record_kernels() as names:`.

    Blocks nest. What other threads run is theirs to record.
    """
    names = []
    token = _recorders.set((*_recorders.get(), names))
    try:
        yield names
    finally:
        _recorders.reset(token)


def ran(*kernels):
    """Called with what bindings returned: the names of the kernels that ran."""
    for names in _recorders.get():
        names.extend(kernels)


def setting_back(arrays):
    """What gives each array the values that it has now: `undo` of all_or_none."""
    return [functools.partial(operator.setitem, array, slice(None), copied(array)) for array in arrays]


def all_or_none(calls, undo):
    """Makes the calls and returns their results. After an exception, a signal handler's too, it makes those of `undo`.

    calls, undo: functools.partial objects of functions in C. Python runs signal handlers between bytecodes, so all of
    `calls` is one step, with whose end `undo`, a list, becomes empty; `undo` is another one. What `undo` takes back may
    be in Python too: a function in `calls`, or `calls` as a generator.
    """
    back = map(_call, undo)
    try:
        return list(map(_call, itertools.chain(calls, [functools.partial(undo.clear)])))[:-1]
    except BaseException:
        list(back)
        raise
