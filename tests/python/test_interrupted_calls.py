# SPDX-License-Identifier: Apache-2.0
"""Calls that a signal handler cuts or enters, at every place where Python runs handlers: a change is done or not."""

import contextlib
import gc
import itertools
import signal

import numpy as np
import pytest
import rooftile as rt
import torch
from interrupts import Handler, interrupt
from kv_caches import kv, row_of, tensors

PAGE, ROWS, PAGES = 32, 4, 12
K, V = tensors(*kv(20, 1, 32, "float32", "interrupted"), "float32")
FORMATS = pytest.mark.parametrize("format", ["int8", "int4-kivi"])


def filled(format):
    """Rows 0 and 1 share a full page and have one each, row 2 has one, row 3 is empty."""
    cache = rt.PagedKVCache(PAGES, PAGE, 1, 32, max_rows=ROWS, max_pages_per_row=3, format=format)
    for _ in range(3):
        cache.append(K, V, rows=[0])
    cache.fork(0, 1)
    cache.truncate([1], [32])
    cache.append(V, K, rows=[2])
    return cache


def check_books(cache):
    users, table = cache._page_state[0], cache.block_table
    assert users.tolist() == torch.bincount(table[table >= 0], minlength=PAGES).tolist()
    assert [(row >= 0).sum().item() for row in table] == [-(-n // PAGE) for n in cache.lengths]
    assert all((row[: (row >= 0).sum()] >= 0).all() for row in table)
    assert cache.free_pages == (users == 0).sum()


def contents(cache):
    return [{name: np.array(x) for name, x in row_of(cache, row).items()} for row in range(ROWS)]


def same(a, b):
    return all(x.keys() == y.keys() and all(np.array_equal(x[n], y[n]) for n in x) for x, y in zip(a, b, strict=True))


CHANGES = {
    "append": lambda c: c.append(K, V, rows=[1]),
    "append_many": lambda c: c.append(K.expand(3, -1, -1, -1), V.expand(3, -1, -1, -1), rows=[3, 1, 2]),
    "append_refused": lambda c: c.append(K.expand(2, -1, -1, -1), V.expand(2, -1, -1, -1), rows=[3, 3]),
    "fork": lambda c: c.fork(0, 2),
    "fork_to_a_shared_row": lambda c: c.fork(2, 1),
    "reorder": lambda c: c.reorder([2, 0, 0, 1]),
    "truncate": lambda c: c.truncate([0, 2], [32, 0] if c.lengths[0] > 32 else [0, 0]),
    "reset": lambda c: c.reset([2, 0]),
    "reset_all": lambda c: c.reset(),
}


def copy_on_write(format):
    """Row 1 shares a page that it has half filled (int8) with row 0."""
    cache = rt.PagedKVCache(PAGES, PAGE, 1, 32, max_rows=ROWS, max_pages_per_row=3, format=format)
    cache.append(K, V, rows=[0])
    cache.reorder([0, 0, 1, 1])
    cache.append(V, K, rows=[2])
    return cache


STARTS = {"filled": filled, "copy_on_write": copy_on_write}


def outcomes(make, change):
    """What the rows hold before the change and after it."""
    cache = make()
    before = contents(cache)
    with contextlib.suppress(rt.ArgumentError):
        change(cache)
    return before, contents(cache)


def works_on(cache):
    """Every row takes tokens, and keeps what it held; no page is lost."""
    before = contents(cache)
    cache.truncate([3], [0])
    for row in (3, 2, 1, 0):
        if cache.lengths[row] + 20 <= cache.capacity:
            cache.append(K, V, rows=[row])
            check_books(cache)
            for other in set(range(3)) - {row}:
                if other < row:
                    assert same([row_of(cache, other)], [before[other]])
    cache.reset()
    assert cache.free_pages == PAGES


def check_whole(cache, before, after):
    check_books(cache)
    now = contents(cache)
    assert same(now, before) or same(now, after), cache.lengths


def quietly(change, cache):
    def body():
        with contextlib.suppress(rt.ArgumentError):
            change(cache)

    return body


@FORMATS
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_whole_or_not(what, start, format):
    before, after = outcomes(lambda: STARTS[start](format), CHANGES[what])
    for at in itertools.count(1):
        cache = STARTS[start](format)
        if not Handler(interrupt, at).run(quietly(CHANGES[what], cache)):
            break
        check_whole(cache, before, after)
        if at % 5 == 0:
            works_on(cache)
    assert at > 5


@pytest.mark.parametrize("what", CHANGES)
def test_two_interrupts(what):
    """The second one comes while the first one goes up the stack."""
    before, after = outcomes(lambda: copy_on_write("int8"), CHANGES[what])
    seconds = 0
    for at in itertools.count(1):
        for then in itertools.count(1):
            cache = copy_on_write("int8")
            if not Handler(interrupt, at, then).run(quietly(CHANGES[what], cache)):
                break
            seconds += 1
            check_whole(cache, before, after)
        if then == 1 and not Handler(interrupt, at).run(quietly(CHANGES[what], copy_on_write("int8"))):
            break
    assert at > 5 and seconds > at


@pytest.mark.parametrize("what", CHANGES)
def test_a_handler_that_reads(what):
    """It finds the rows as they are before the change, or as they are after it."""
    before, after = outcomes(lambda: copy_on_write("int8"), CHANGES[what])
    for at in itertools.count(1):
        cache, seen = copy_on_write("int8"), []
        if not Handler(lambda c=cache, s=seen: s.extend(contents(c)), at).run(quietly(CHANGES[what], cache)):
            break
        assert same(seen, before) or same(seen, after)
        assert same(contents(cache), after)
    assert at > 5


@pytest.mark.parametrize("inner", ["append", "fork", "reorder", "truncate", "reset"])
@pytest.mark.parametrize("what", ["append_many", "fork", "reorder", "truncate", "reset"])
def test_a_handler_that_calls(what, inner):
    """A handler's call on the cache is refused while another one is under way, and right before it and after it."""
    errors = []
    for at in itertools.count(1, 3):
        cache = filled("int8")

        def act(cache=cache):
            try:
                CHANGES[inner](cache)
            except rt.NotSupportedError as error:
                errors.append(str(error))
            except rt.ArgumentError:  # the rows are shorter already
                pass

        if not Handler(act, at).run(quietly(CHANGES[what], cache)):
            break
        check_books(cache)
    op = what.partition("_")[0]
    assert len(errors) > 5
    expected = f"{inner}: this cache is in the middle of {op}, which a signal handler or a finaliser (__del__) of the"
    assert all(error.startswith(expected) for error in errors)


def test_a_finaliser_that_calls():
    errors = []

    class Last:
        def __init__(self, cache):
            self.cache, self.loop = cache, self  # for the collector

        def __del__(self):
            try:
                self.cache.append(K, V, rows=[2])
            except rt.NotSupportedError as error:
                errors.append(error)

    gc.freeze()  # a collection looks at what is made from here on, not at all that torch has made
    try:
        for at in itertools.count(1):
            cache = filled("int8")
            Last(cache)
            if not Handler(gc.collect, at).run(lambda: cache.append(K, V, rows=[3])):  # noqa: B023
                break
            check_books(cache)
    finally:
        gc.unfreeze()
    assert errors and len(errors) < at - 1  # of the places some lie before the change begins, or behind it


def test_a_signal_of_the_system():
    """KeyboardInterrupt as it comes, by a timer."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    generator = np.random.default_rng(0)
    cut = 0
    try:
        for _ in range(300):
            cache = copy_on_write("int8")
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-6, 6e-5))
                CHANGES["append_many"](cache)
                signal.pause()
            except KeyboardInterrupt:
                cut += cache.lengths[3] == 0
            check_books(cache)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert cut


MODEL_CHANGES = {
    "truncate": lambda m: m.truncate([0, 1], [32, 0]),
    "truncate_refused": lambda m: m.truncate([0], [17]),  # by the kivi layer, the last one
    "reorder": lambda m: m.reorder([1, 0]),
    "reset": lambda m: m.reset([0]),
    "fork": lambda m: m.fork(1, 0),
}


@pytest.mark.parametrize("what", MODEL_CHANGES)
def test_all_layers_or_none(what):
    def make():
        model = rt.ModelKVCache(3, 2, 64, 1, 32, format={"default": "int8", -1: "int4-kivi"})
        for layer in model:
            layer.append(K, V, rows=[1])
            for k in (K, V):
                layer.append(k, k, rows=[0])
        return model

    def held(model):
        return [row_of(layer, row) for layer in model for row in range(2)]

    change, whole = MODEL_CHANGES[what], make()
    before = held(whole)
    quietly(change, whole)()
    after = held(whole)
    for at in itertools.count(1):
        model = make()
        if not Handler(interrupt, at).run(quietly(change, model)):
            break
        now = held(model)
        assert same(now, before) or same(now, after), [layer.lengths for layer in model]
    assert at > 10
