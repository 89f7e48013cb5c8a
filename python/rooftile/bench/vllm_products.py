# SPDX-License-Identifier: Apache-2.0
"""vLLM's 4-bit products, where vLLM is installed: Marlin (Frantar et al. 2024, arXiv 2408.11743) and Machete."""

import functools

import torch


def products(codes, scales, group_size):
    """{"marlin": (pack, {kernel: call}), "machete": ...}; ImportError without vLLM.

    codes: uint8 [N, K / 2], low nibble first, of weights (u - 8) * scale. scales: float16 [N, K / group_size].
    pack() makes the weight's arrays, new ones each time; call(x, arrays) is x [M, K] times its transpose, [M, N].
    Machete has a call for each of its schedules, besides the one that it chooses itself.
    What another version of vLLM does not have raises in them, in its own ways.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    n, k = codes.shape[0], 2 * codes.shape[1]
    kind, device = scalar_types.uint4b8, codes.device
    qweight = codes.view(torch.int32).T.contiguous()  # GPTQ's, [K / 8, N]
    group_scales = scales.T.contiguous()  # [K / group_size, N]

    def pack_marlin():
        none = marlin_utils.marlin_make_empty_g_idx(device)
        packed = ops.gptq_marlin_repack(qweight, none, k, n, 4)
        permuted = marlin_utils.marlin_permute_scales(group_scales, k, n, group_size)
        return packed, permuted, none, marlin_utils.marlin_make_workspace_new(device)

    def marlin(x, arrays):
        packed, permuted, none, workspace = arrays
        return marlin_utils.apply_gptq_marlin_linear(
            x, packed, permuted, none, none, none, workspace, kind, n, k, is_k_full=True
        )

    def pack_machete():
        column_major = qweight.T.contiguous().T
        packed = ops.machete_prepack_B(column_major, torch.float16, kind, torch.float16)
        return packed, group_scales.clone()

    def machete(x, arrays, schedule=None):
        packed, own_scales = arrays
        chosen = {} if schedule is None else {"schedule": schedule}
        return ops.machete_mm(
            a=x, b_q=packed, b_type=kind, b_group_scales=own_scales, b_group_size=group_size, **chosen
        )

    schedules = {"vllm.machete": machete}
    if hasattr(ops, "machete_supported_schedules"):
        for name in ops.machete_supported_schedules(torch.float16, kind, torch.float16):
            schedules[f"vllm.machete {name}"] = functools.partial(machete, schedule=name)
    return {"marlin": (pack_marlin, {"vllm.marlin": marlin}), "machete": (pack_machete, schedules)}
