# SPDX-License-Identifier: Apache-2.0
"""The bits of compressed-tensors, GPTQ and AWQ weights, as W4Weight or W8Weight, and of MXFP4, in 16 bits. Lossless.

What the arrays' shapes and dtypes must be is their caller's to check (sources.py); what they hold is checked here.
`where` begins every error: the file and the module.
"""

import torch

from rooftile.errors import ArgumentError
from rooftile.gemm import WEIGHTS

# column of eight that each nibble of an AWQ word holds, and its inverse: the nibble that holds each column
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_NIBBLES = [_AWQ_COLUMNS.index(column) for column in range(8)]
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes without their sign bit, the highest of four


def from_compressed_tensors(where, bits, packed, scale, n, k, group_size, zero_point=None, g_idx=None):
    """pack-quantized. packed: int32 [N, ceil(K * bits / 32)], low bits first, stored value q + 2^(bits - 1). scale:
    [N, K/group_size]. zero_point: int32 [ceil(N * bits / 32), K/group_size], packed along N the same way, or None.
    g_idx: int32 [K] or None."""
    codes = packed.contiguous().view(torch.uint8)[:, : k * bits // 8]
    zeros = None if zero_point is None else _codes(bits, zero_point.T)[:, :n].T
    return _weight(where, bits, codes, scale, zeros, k, group_size, "weight_g_idx", g_idx)


def from_gptq(where, bits, qweight, qzeros, scales, k, group_size, *, stored_minus_one, symmetric, g_idx=None):
    """qweight: int32 [K * bits / 32, N], packed along K, low bits first. qzeros: int32 [K/group_size, N * bits / 32],
    packed along N; stored_minus_one: as v1 does. scales: [K/group_size, N]. symmetric: what the config says, so all
    zeros must be 2^(bits - 1). g_idx: int32 [K] or None."""
    zeros, highest, middle = _codes(bits, qzeros).T, 2**bits - 1, 2 ** (bits - 1)
    if stored_minus_one:
        if (zeros == highest).any():
            # a zero of 0 less one, wrapped; what lies beside it may have lost a borrow, and readers differ
            raise ArgumentError(
                f"{where}: qzeros holds the code {highest}, which in checkpoint_format 'gptq' may mean the zero "
                f"{highest + 1} or 0; expected codes up to {highest - 1}, or the checkpoint saved as 'gptq_v2'"
            )
        zeros = zeros + 1
    if symmetric and (zeros != middle).any():
        wrong = int(zeros[zeros != middle][0])
        raise ArgumentError(
            f"{where}: qzeros gives the zero {wrong}, expected {middle} everywhere, since the config says "
            "sym = true (is checkpoint_format right?)"
        )
    codes = qweight.T.contiguous().view(torch.uint8)
    return _weight(where, bits, codes, scales.T, zeros, k, group_size, "g_idx", g_idx)


def from_awq(where, qweight, qzeros, scales, k, group_size):
    """Version gemm, 4 bits. qweight: int32 [K, N/8] and qzeros: int32 [K/group_size, N/8], packed along N, columns of
    eight in the order 0, 2, 4, 6, 1, 3, 5, 7 from the low nibble on. scales: [K/group_size, N]."""

    def columns(words):
        nibbles = _codes(4, words)
        return nibbles.view(len(nibbles), -1, 8)[..., _AWQ_NIBBLES].reshape(len(nibbles), -1)

    codes = _pack(4, columns(qweight).T)
    return _weight(where, 4, codes, scales.T, columns(qzeros).T, k, group_size, "g_idx", None)


def from_mxfp4(where, blocks, scales):
    """OCP MX: e2m1 codes under an e8m0 scale for each 32. blocks: uint8 [..., B, 16], two codes a byte, low bits first.
    scales: uint8 [..., B], powers of two with bias 127. Returns bfloat16 [..., 32 B], exact."""
    largest = int(scales.max())
    if largest > 252:
        raise ArgumentError(
            f"{where} holds {largest}, expected 0 to 252 (255 is NaN; 253 and 254 pass the largest bfloat16)"
        )
    values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.bfloat16, device="cpu")
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)  # of every byte
    codes = pairs.view(torch.int32).flatten().index_select(0, blocks.flatten().to(torch.int32))
    powers = torch.tensor([2.0 ** (code - 127) for code in range(253)], dtype=torch.bfloat16, device="cpu")
    scale = powers.index_select(0, scales.flatten().to(torch.int32))
    return (codes.view(torch.bfloat16).view(-1, 32) * scale.view(-1, 1)).view(*scales.shape[:-1], -1)


def _codes(bits, packed):
    """int32 or uint8 [rows, words] -> uint8 [rows, codes], a code each, low bits first."""
    taken = packed.contiguous().view(torch.uint8)
    return taken if bits == 8 else torch.stack((taken & 15, taken >> 4), dim=-1).view(len(taken), -1)


def _pack(bits, codes):
    """uint8 [rows, K], a code each -> the exchange form's uint8 [rows, K * bits / 8]."""
    return codes.contiguous() if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4


def _weight(where, bits, codes, scales, zeros, k, group_size, g_idx_name, g_idx):
    """The weight of codes uint8 [N, K * bits / 8] in the source's order; zeros that are all in the middle of the codes
    are the symmetric kind."""
    if zeros is not None and (zeros == 2 ** (bits - 1)).all():
        zeros = None
    perm = None if g_idx is None else _perm(where, g_idx_name, g_idx, k, group_size)
    if perm is not None:
        codes = _pack(bits, _codes(bits, codes)[:, perm])
        perm = perm.to(torch.int32)
    try:
        return WEIGHTS[bits].from_canonical(codes, scales, zeros, group_size=group_size, perm=perm)
    except ArgumentError as e:
        raise ArgumentError(f"{where}: {e}") from None


def _perm(where, name, g_idx, k, group_size):
    """The columns in the order of their groups, int64 [K]; None where they lie so already."""
    groups, g_idx = k // group_size, g_idx.to(torch.int64)
    if ((g_idx < 0) | (g_idx >= groups)).any():
        wrong = int(g_idx[(g_idx < 0) | (g_idx >= groups)][0])
        raise ArgumentError(f"{where}: {name} holds the group {wrong}, expected 0 to {groups - 1}")
    members = torch.bincount(g_idx, minlength=groups)
    if (members != group_size).any():
        group = int((members != group_size).nonzero()[0])
        raise ArgumentError(
            f"{where}: {name} puts {int(members[group])} columns into group {group}, expected group_size = "
            f"{group_size} in every group"
        )
    perm = torch.argsort(g_idx, stable=True)
    return None if torch.equal(perm, torch.arange(k, device=perm.device)) else perm
