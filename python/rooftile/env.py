# SPDX-License-Identifier: Apache-2.0
"""What this installation is and what it can run: for `rooftile env`, bug reports and benchmark files."""

import ctypes.util
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

from rooftile import _C
from rooftile._arrays import shown
from rooftile.errors import ArgumentError

PACKAGES = ("torch", "numpy", "jax", "transformers", "nanobind-backend")
OPS = (
    "decode_attention",
    "prefill_attention",
    "merge_attention",
    "kv_cache",
    "w4a16_matmul",
    "w8a16_matmul",
    "linear",
    "rms_norm",
    "add_rms_norm",
    "qk_rms_norm",
    "embedding",
    "layer_norm",
    "add_layer_norm",
    "rope",
    "rope_append",
    "silu_mul",
    "gelu_mul",
    "softmax",
    "sample",
)
CPU_ONLY_OPS = ("prefill_attention",)  # in a build with GPU kernels too


def warmup(device=None):
    """Load every kernel that a GPU runs onto it: what a kernel's first use does, and a CUDA graph capture may not.

    device: a torch.device, "cuda:1" or an index; default: torch's current device, or 0 without torch. Call it once
    before the first capture. Without a GPU there is nothing to load and nothing is done, unless `device` asks for one:
    NotSupportedError in a build without GPU kernels, DeviceError where the device cannot be used.
    """
    torch = sys.modules.get("torch")
    if device is None:
        if _C.gpu_count() == 0:
            return
        _C.warmup(0 if torch is None or not torch.cuda.is_available() else torch.cuda.current_device())
        return
    kind, _, index = str(device).rpartition(":") if ":" in str(device) else (str(device), "", "")
    if kind.isdecimal() and not index:
        kind, index = "cuda", kind
    if kind == "cpu":
        return
    if kind != "cuda" or not (index == "" or index.isdecimal()):
        raise ArgumentError(f'warmup: device must be a CUDA device such as "cuda:0" or its index, got {shown(device)}')
    current = torch.cuda.current_device() if index == "" and torch is not None and torch.cuda.is_available() else 0
    _C.warmup(int(index) if index else current)


def env():
    """A dict of plain values, ready for JSON.

    version, commit (None outside a checkout), binding ("split" or "linked"), python, platform, cpu {model, cores,
    variants: runnable kernel variants best first, chosen, threads, parallel}, gpu {backend, driver: libcuda is there,
    devices [{name, compute_capability, memory_gb}, or {error} for one that torch cannot use]: None until torch is
    imported, which counts them},
    packages {name: version or None}, torch_exchange_table (bool; None without torch), ops {name: {cpu, gpu}}: the
    kernel variant that an op takes, or "none". Imports nothing that is not imported yet: torch_exchange_table is
    None until torch is.
    """
    variants = _C.cpu_variants().split(", ")
    chosen = variants[0]
    gpu = _C.gpu_backend()
    gpu_kernels = "none" if gpu.startswith("none") else gpu
    return {
        "version": _C.version,
        "commit": commit(),
        "binding": _C.binding_mode,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {
            "model": cpu_model(),
            "cores": os.cpu_count(),
            "variants": variants,
            "chosen": chosen,
            "threads": _C.parallel_threads(),
            "parallel": _C.parallel_backend(),
        },
        "gpu": {"backend": gpu, "driver": ctypes.util.find_library("cuda") is not None, "devices": _gpus()},
        "packages": {name: _package(name) for name in PACKAGES},
        "torch_exchange_table": _exchange_table(),
        "ops": {op: {"cpu": chosen, "gpu": "none" if op in CPU_ONLY_OPS else gpu_kernels} for op in OPS},
    }


def format_text(facts):
    """`env()` as aligned lines for a terminal."""
    rows = _rows(facts)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    ops = facts["ops"]
    width = max(len("op"), *(len(op) for op in ops))
    cpu = max(len("cpu"), *(len(kernels["cpu"]) for kernels in ops.values()))
    lines += ["", f"{'op':<{width}}  {'cpu':<{cpu}}  gpu"]
    lines += [f"{op:<{width}}  {kernels['cpu']:<{cpu}}  {kernels['gpu']}" for op, kernels in ops.items()]
    return "\n".join(lines)


def format_markdown(facts):
    """`env()` as two tables, for an issue."""
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in _rows(facts))]
    lines += ["", "| op | cpu | gpu |", "|---|---|---|"]
    lines += [f"| {op} | {kernels['cpu']} | {kernels['gpu']} |" for op, kernels in facts["ops"].items()]
    return "\n".join(lines)


def _rows(facts):
    cpu, gpu = facts["cpu"], facts["gpu"]
    table = {None: "torch is not imported", True: "yes", False: "no: slower calls, torch >= 2.10 has it"}
    return [
        ("rooftile", f"{facts['version']}" + (f" ({facts['commit']})" if facts["commit"] else "")),
        ("binding", facts["binding"]),
        ("python", facts["python"]),
        ("platform", facts["platform"]),
        ("cpu", f"{cpu['model']}, {cpu['cores']} cores"),
        ("cpu variants", f"{', '.join(cpu['variants'])} (chosen: {cpu['chosen']})"),
        ("threads", f"{cpu['threads']}, {cpu['parallel']}"),
        ("gpu backend", gpu["backend"]),
        ("CUDA driver", "found" if gpu["driver"] else "not found"),
        *(
            (
                f"gpu {i}",
                d.get("error") or f"{d['name']}, compute capability {d['compute_capability']}, {d['memory_gb']} GB",
            )
            for i, d in enumerate(gpu["devices"] or ())
        ),
        *((name, version or "not installed") for name, version in facts["packages"].items()),
        ("torch C exchange table", table[facts["torch_exchange_table"]]),
    ]


def _package(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus():
    torch = sys.modules.get("torch")
    return None if torch is None else [_gpu(torch, i) for i in range(torch.cuda.device_count())]


def _gpu(torch, index):
    try:
        gpu = torch.cuda.get_device_properties(index)
    except RuntimeError as e:  # counted, but its driver or its mode keeps CUDA out
        return {"error": str(e).partition("\n")[0]}
    return {
        "name": gpu.name,
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "memory_gb": round(gpu.total_memory / 1e9, 1),
    }


def _exchange_table():
    torch = sys.modules.get("torch")
    return None if torch is None else hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def cpu_model():
    """What the CPU calls itself, where Linux says it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit():
    """The commit of the checkout that this package lies in; None for an installed one."""
    root = Path(__file__).parents[2]
    return output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD") if (root / ".git").exists() else None


def output(*command):
    """What a command prints, or None where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
