# SPDX-License-Identifier: Apache-2.0
"""What every results file begins with (schema 1): what was measured, of which build, when, on what."""

import datetime
import os

from rooftile import __version__
from rooftile.env import commit, cpu_model, output

COMMIT_HELP = "what the results file calls this build (default: git's name for it, or the version)"


def head(family, commit_name=None):
    return {
        "schema": 1,
        "family": family,
        "commit": commit_name or commit() or __version__,
        "date": datetime.date.today().isoformat(),
    }


def machine(device):
    """The CPU, or the GPU with driver and CUDA; torch. device: "cpu" or a CUDA device.

    driver is "unknown" where nvidia-smi does not say.
    """
    import torch

    if device == "cpu":
        return {"cpu": cpu_model(), "cores": os.cpu_count(), "torch": torch.__version__}
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # torch and nvidia-smi need not count alike
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", gpu) or "unknown",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }
