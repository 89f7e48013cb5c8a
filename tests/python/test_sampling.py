# SPDX-License-Identifier: Apache-2.0
"""sample: against the oracle token by token, transformers' processors by what may be drawn, and by frequencies."""

import itertools
import math

import cases
import numpy as np
import oracle
import pytest
import rooftile as rt
import torch

ORDERS = ("transformers", "vllm")
SETTINGS = [
    dict(zip(("top_k", "top_p", "min_p", "order"), values, strict=True))
    for values in itertools.product((None, 1, 7, 10**6), (None, 0.0, 0.4, 0.95, 1.0), (None, 0.02), ORDERS)
]


def data(device, shape, dtype, *key, **kw):
    array = cases.values(shape, dtype, *key, **kw)
    return array, cases.tensor(array, dtype, device)


def seeds_of(rows, device, *key):
    seeds = cases.generator("seeds", rows, *key).integers(0, 2**63, rows)
    return seeds, torch.from_numpy(seeds).to(device)


def drawn(logits, times, **settings):
    """The tokens that `times` seeds draw from one row of logits."""
    seeds = torch.arange(times, device=logits.device) * 7919
    return rt.sample(logits.expand(times, -1), seeds=seeds, **settings)


def test_the_oracles_random_bits():
    """The known answers of Philox's authors (Random123, kat_vectors)."""
    assert oracle.philox(0, 0) == 0xE169C58D_6627E8D5
    assert oracle.philox(2**64 - 1, 2**128 - 1) == 0x41C83B0E_408F276D
    assert oracle.philox(0x299F31D0_A4093822, 0x03707344_13198A2E_85A308D3_243F6A88) == 0x94FDCCEB_D16CFE09


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 577, 4099, 50000, 131080])
def test_tokens(n, dtype, device, plan):
    x, logits = data(device, (5, n), dtype, "sample", n, spread=2.5)
    seeds, s = seeds_of(5, device, n)
    settings = SETTINGS if n < 4099 else SETTINGS[:: 7 if n < 50000 else 19]
    for number, chosen in enumerate(settings):
        temperature = (1.0, 0.3, 2.5)[number % 3]
        positions = np.arange(5) * number
        got = rt.sample(
            logits,
            temperature=temperature,
            seeds=s,
            positions=torch.from_numpy(positions).to(device),
            plan=plan,
            **chosen,
        )
        assert got.dtype == torch.int64 and got.device == logits.device
        expected = oracle.sample(x, temperature, seeds=seeds, positions=positions, **chosen)
        assert got.tolist() == expected.tolist(), (chosen, temperature)


@pytest.mark.parametrize("n", [1, 33, 4099, 50000])
def test_greedy_is_argmax(n, dtype, device, plan):
    _, logits = data(device, (4, n), dtype, "greedy", n)
    assert torch.equal(rt.sample(logits, temperature=0, plan=plan), logits.argmax(-1))
    ties = torch.zeros(6, n, dtype=logits.dtype, device=device)
    ties[1, n // 2 :] = 1
    ties[2, : n // 2] = -0.0
    ties[3, n // 3] = ties[3, n - 1] = math.inf
    ties[4] = -math.inf
    ties[5, n // 2 :] = math.nan
    assert torch.equal(rt.sample(ties, temperature=0.0, plan=plan).cpu(), ties.cpu().float().argmax(-1))


def test_rows_without_probabilities_get_no_token(dtype, device, plan):
    _, logits = data(device, (5, 300), dtype, "none")
    logits[0, 7] = math.nan
    logits[1, 299] = math.inf
    logits[2] = -math.inf
    logits[3, :299] = -math.inf
    _, seeds = seeds_of(5, device)
    tokens = rt.sample(logits, seeds=seeds, top_k=5, top_p=0.9, plan=plan)
    assert tokens[:4].tolist() == [-1, -1, -1, 299] and tokens[4] >= 0


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 100])
def test_temperatures_at_the_ends(temperature, dtype, device, plan):
    _, x = data(device, (40,), dtype, "ends", spread=3.0)
    tokens = drawn(x, 500, temperature=temperature, plan=plan)
    if temperature < 1:
        assert (tokens == x.argmax()).all()
    else:
        assert len(tokens.unique()) == 40


def test_the_highest_temperature_tells_float32_logits_apart(plan):
    x = torch.tensor([20.0, np.nextafter(np.float32(20), np.float32(21)), 19.0])
    assert drawn(x, 300, temperature=100, top_k=1, plan=plan).unique().tolist() == [1]
    assert drawn(x, 300, temperature=100, top_p=0.0, plan=plan).unique().tolist() == [1]


def test_what_equals_the_last_of_top_k_stays(device, plan):
    x = torch.tensor([1.0, 3.0, 0.0, 3.0, 2.0, 3.0], device=device, dtype=torch.bfloat16)
    assert drawn(x, 300, top_k=1, plan=plan).unique().tolist() == [1, 3, 5]
    assert drawn(x, 300, top_k=4, plan=plan).unique().tolist() == [1, 3, 4, 5]


def test_top_p_takes_the_first_of_equal_tokens(device, plan):
    x = torch.zeros(10, device=device, dtype=torch.bfloat16)
    for top_p, kept in ((0.0, 1), (0.1, 1), (0.11, 2), (0.35, 4), (0.5, 5), (1.0, 10)):
        assert drawn(x, 400, top_p=top_p, plan=plan).unique().tolist() == list(range(kept)), top_p


@pytest.mark.parametrize("settings", [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.7}])
def test_frequencies(settings, device, plan):
    """Chi squared of 40,000 draws; 6 standard deviations."""
    x, logits = data(device, (40,), "float32", "frequencies")
    logits = logits if device == "cpu" else logits.to(torch.float32)
    p = np.exp(x - x.max())
    kept = oracle.kept_tokens(np.floor((x.max() - x) * 2**26), np.floor(p * 2**40), **settings)
    p = np.where(kept, p, 0) / p[kept].sum()
    times = 40000
    counts = torch.bincount(drawn(logits, times, plan=plan, **settings).cpu(), minlength=40).numpy()
    assert (counts[~kept] == 0).all()
    chi2, free = ((counts - times * p)[kept] ** 2 / (times * p[kept])).sum(), kept.sum() - 1
    assert chi2 < free + 6 * math.sqrt(2 * free)


def warped(logits, top_k=None, top_p=None, min_p=None):
    """What transformers' processors leave, in its order."""
    processors = pytest.importorskip("transformers").generation.logits_process
    for processor, value in (
        (processors.TopKLogitsWarper, top_k),
        (processors.TopPLogitsWarper, top_p),
        (processors.MinPLogitsWarper, min_p),
    ):
        if value is not None:
            logits = processor(value)(None, logits)
    return logits


@pytest.mark.parametrize("seed", range(6))
def test_transformers_processors_leave_the_same_tokens(seed, plan):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 60, generator=generator)
    for settings in ({"top_k": 9}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 25, "top_p": 0.8, "min_p": 0.25}):
        kept = warped(logits, **settings)[0].isfinite().nonzero()[:, 0].tolist()
        assert drawn(logits[0], 6000, plan=plan, **settings).unique().tolist() == kept, settings


def test_the_orders_differ_in_what_top_p_is_a_part_of(device, plan):
    """0.55 of all probabilities is more than the first token's; of those that min_p leaves it is less."""
    p = torch.tensor([0.4, 0.3, *[0.01] * 30], device=device)
    settings = {"top_p": 0.72, "min_p": 0.5, "plan": plan}
    assert drawn(p.log(), 500, order="transformers", **settings).unique().tolist() == [0, 1]
    settings = {"top_p": 0.55, "min_p": 0.5, "plan": plan}
    assert drawn(p.log(), 500, order="transformers", **settings).unique().tolist() == [0, 1]
    assert drawn(p.log(), 500, order="vllm", **settings).unique().tolist() == [0]


def test_repetition_penalty_is_transformers(dtype, plan):
    transformers = pytest.importorskip("transformers")
    _, logits = data("cpu", (6, 400), dtype, "penalty")
    ids = torch.from_numpy(cases.generator("penalty").integers(0, 400, (6, 300)))  # many of them twice
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(ids, logits.float()).argmax(-1)
    assert not torch.equal(expected, logits.argmax(-1))
    settings = {"temperature": 0, "repetition_penalty": 1.7, "plan": plan}
    assert torch.equal(rt.sample(logits, token_ids=ids, **settings), expected)
    padded = torch.cat([torch.full((6, 3), -1), ids, torch.full((6, 2), 400)], 1).int()
    assert torch.equal(rt.sample(logits, token_ids=padded, **settings), expected)


@pytest.mark.parametrize("n", [200, 70000])
def test_repetition_penalty_when_drawing(n, dtype, device, plan):
    x, logits = data(device, (4, n), dtype, "penalised", n, spread=2.0)
    ids = cases.generator("penalised", n).integers(-5, n, (4, n // 2))
    seeds, s = seeds_of(4, device)
    settings = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3}
    got = rt.sample(logits, token_ids=torch.from_numpy(ids).to(device), seeds=s, plan=plan, **settings)
    assert got.tolist() == oracle.sample(x, token_ids=ids, seeds=seeds, **settings).tolist()


def test_a_row_gets_its_token_alone_and_in_a_batch(dtype, device, plan):
    _, logits = data(device, (33, 20000), dtype, "alone", spread=2.0)
    _, seeds = seeds_of(33, device)
    positions = torch.arange(33, device=device, dtype=torch.int32)
    together = rt.sample(logits, seeds=seeds, positions=positions, top_p=0.9, plan=plan)
    for row in range(33):
        one = slice(row, row + 1)
        alone = rt.sample(logits[one], seeds=seeds[one], positions=positions[one], top_p=0.9, plan=plan)
        assert alone.item() == together[row]


def test_seed_and_position_decide(device, plan):
    _, x = data(device, (500,), "float16", "seeds")
    logits = x.expand(200, -1)
    seeds, other = torch.full((200,), 5, device=device), torch.arange(200, device=device)
    assert len(rt.sample(logits, seeds=seeds, plan=plan).unique()) == 1
    by_position = rt.sample(logits, seeds=seeds, positions=other, plan=plan)
    by_seed = rt.sample(logits, seeds=other, plan=plan)
    assert len(by_position.unique()) > 50 and len(by_seed.unique()) > 50
    shifted = rt.sample(logits, seeds=seeds + 1, positions=other, plan=plan)  # no seed's stream is another's, later
    assert (by_position[1:] == shifted[:-1]).sum() < 20 and (by_position == by_seed).sum() < 20
    assert torch.equal(by_position, rt.sample(logits, seeds=seeds, positions=other.int(), plan=plan))


def test_shapes_and_outputs(device, plan):
    x, logits = data(device, (2, 3, 50), "float16", "shapes")
    seeds, s = seeds_of(6, device)
    expected = oracle.sample(x.reshape(6, 50), seeds=seeds).reshape(2, 3).tolist()
    assert rt.sample(logits, seeds=s.view(2, 3), plan=plan).tolist() == expected
    out = torch.full((2, 6), 9, device=device, dtype=torch.int32)
    assert rt.sample(logits, seeds=s.view(2, 3), out=out[:, ::2], plan=plan).data_ptr() == out.data_ptr()
    assert out[:, ::2].tolist() == expected and (out[:, 1::2] == 9).all()
    one = rt.sample(logits[1, 2], seeds=s[5], plan=plan)
    assert one.shape == () and one.item() == expected[1][2]


def test_arrays_of_numpy():
    x = cases.values((3, 50), "float32", "numpy").astype(np.float32)
    seeds = np.arange(3)
    tokens = rt.sample(x, seeds=seeds, top_k=5)
    assert isinstance(tokens, np.ndarray) and tokens.dtype == np.int64
    assert tokens.tolist() == oracle.sample(x, seeds=seeds, top_k=5).tolist()


def test_errors_say_what_is_missing():
    x = torch.randn(2, 9)
    with pytest.raises(rt.ArgumentError, match=r"^sample: logits must have 1 to 6 dimensions, got float32\[\]"):
        rt.sample(x[0, 0], temperature=0)
    for penalty in (1e-46, 1e39):
        with pytest.raises(rt.ArgumentError, match="repetition_penalty must be positive and finite in float32"):
            rt.sample(x, temperature=0, token_ids=torch.zeros(2, 1, dtype=torch.int64), repetition_penalty=penalty)
    with pytest.raises(rt.ArgumentError, match="token_ids must have a last dimension of at most 1073741824"):
        rt.sample(x, temperature=0, token_ids=torch.zeros(2, 1, dtype=torch.int64).expand(2, 2**30 + 1))
    with pytest.raises(rt.ArgumentTypeError, match=r"sample: seeds must be a tensor, int64, one a row"):
        rt.sample(x)
    with pytest.raises(rt.ArgumentTypeError, match="sample: token_ids must be a tensor"):
        rt.sample(x, temperature=0, repetition_penalty=1.1)
    with pytest.raises(rt.ArgumentError, match="logits must have a last dimension of 1 to 4194304"):
        rt.sample(torch.empty(1, 0), temperature=0)
    with pytest.raises(rt.ArgumentError, match="logits must have a last dimension of 1 to 4194304"):
        rt.sample(torch.zeros(1).expand(1, 2**22 + 1), temperature=0)
    with pytest.raises(rt.ArgumentError, match='did you mean "vllm"'):
        rt.sample(x, temperature=0, order="vlm")
    with pytest.raises(rt.ArgumentError, match=r"seeds must have logits' leading dimensions \[2\]"):
        rt.sample(x, seeds=torch.zeros(3, dtype=torch.int64))
