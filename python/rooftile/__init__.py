# SPDX-License-Identifier: Apache-2.0
"""rooftile: LLM-inference kernels made of CuTe tiles, with a CPU twin for every one of them."""

from rooftile import _C
from rooftile._arrays import record_kernels
from rooftile.errors import ArgumentError, ArgumentTypeError, DeviceError, NotSupportedError, RooftileError
from rooftile.fused import rms_norm
from rooftile.gemm import W4Weight, w4a16_matmul
from rooftile.quantize import W4A16, quantize_

__version__ = _C.version

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "DeviceError",
    "NotSupportedError",
    "RooftileError",
    "W4A16",
    "W4Weight",
    "quantize_",
    "record_kernels",
    "rms_norm",
    "w4a16_matmul",
]
