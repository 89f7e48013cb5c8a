#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What an eager call costs the host, in microseconds: from Python until its kernels are queued. On a CPU: the whole
call, of the smallest shapes there are. Outputs are given, queues are not full, and the cases take turns.

host_cost.py [--device cuda|cpu] [--rounds 40] [--calls 200] [--json]

The installed rooftile is measured; PYTHONPATH=FOLDER python bench/host_cost.py measures the one in FOLDER. To compare
two, let them take turns several times on a machine that does nothing else, and compare the best of each: torch's row
is the same in all of them, so it tells how much of the difference is the machine's.
"""

import argparse
import json
import os
import statistics
import sys
import time

import rooftile as rt
import torch


def cases(device):
    """{name: call}. On a GPU "one" and "two" are the kernels of a decode_attention call."""
    gpu = device == "cuda"
    kind = {"dtype": torch.float16 if gpu else torch.float32, "device": device}
    heads, kv_heads, dim, width = (32, 8, 128, 4096) if gpu else (1, 1, 32, 64)

    def decode(batch, tokens, format, paged):
        shape = {"format": format, **kind}
        if paged:
            cache = rt.PagedKVCache(batch * (tokens // 64 + 1), 64, kv_heads, dim, max_rows=batch, **shape)
        else:
            cache = rt.KVCache(batch, tokens, kv_heads, dim, **shape)
        k = torch.randn(batch, tokens, kv_heads, dim, **kind)
        cache.append(k, k)
        q = torch.randn(batch, heads, dim, **kind)
        out = torch.empty_like(q)
        return lambda: rt.decode_attention(q, cache, out=out)

    x, weight, full = torch.randn(1, width, **kind), torch.ones(width, **kind), torch.randn(width, width, **kind)
    y, w4 = torch.empty_like(x), rt.W4Weight.quantize(full, group_size=32)
    short, long = (256, 64) if gpu else (8, 8)
    return {
        "rms_norm": lambda: rt.rms_norm(x, weight, out=y),
        "linear": lambda: rt.linear(x, full, out=y),
        "w4a16_matmul": lambda: rt.w4a16_matmul(x, w4, out=y),
        "decode, one": decode(1, short, "int8", False),
        "decode, one, int4-kivi in pages": decode(1, short, "int4-kivi", True),
        "decode, two": decode(64 if gpu else 1, long, "int8", False),
        "decode, two, int4-kivi in pages": decode(64 if gpu else 1, long, "int4-kivi", True),
        "torch linear": lambda: torch.nn.functional.linear(x, full),
    }


def measure(calls, device, rounds, count):
    """{name: [microseconds a call in each round]}."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(count):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            wait()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            times[name].append((time.perf_counter() - begin) / count * 1e6)
    wait()
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.rounds < 1 or args.calls < 1:
        sys.exit("host_cost: --rounds and --calls must be at least 1")
    torch.set_num_threads(1)
    times = measure(cases(args.device), args.device, args.rounds, args.calls)
    rows = [{"case": name, "us_min": min(us), "us": statistics.median(us)} for name, us in times.items()]
    if args.json:
        print(json.dumps({"rooftile": os.path.dirname(rt.__file__), "device": args.device, "rows": rows}))
        return
    print(f"{'host us a call, ' + args.device:34} {'best':>7} {'median':>7}")
    for row in rows:
        print(f"{row['case']:34} {row['us_min']:7.2f} {row['us']:7.2f}")


if __name__ == "__main__":
    main()
