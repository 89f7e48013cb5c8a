# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other libraries into rooftile's: 16-bit folders, compressed-tensors, GPTQ, AWQ, MXFP4, GGUF."""

from rooftile.checkpoints.convert import convert, load

__all__ = ["convert", "load"]
