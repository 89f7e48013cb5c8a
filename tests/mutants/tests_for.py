# SPDX-License-Identifier: Apache-2.0
"""Which tests can reach a file's mutants: C++ test binaries (c:NAME) and files of tests/python (test_NAME.py)."""

import re

CONTRACTS = "empty poison layout_invariance bad_input row_independence limits properties"
ATTENTION = "c:test_attention decode_attention prefill_attention merge_attention"
CACHE = (
    "c:test_ops_kv_cache kv_cache kv_cache_arguments kv_cache_paged kv_cache_host_books kv_cache_device"
    " bad_constructors decode_attention transformers"
)
WEIGHTS = "c:test_w4a16 w4a16 w4a16_modules w4a16_device bad_constructors"
LINEAR = "c:test_linear linear linear_device"
FUSED = "c:test_ops_fused fused"
FILES = "checkpoints checkpoints_refused gguf tokenizer fetch untrusted_files transformers cli"

RULES = (  # the first that fits the path
    (r"attention", f"{ATTENTION} kv_cache kv_cache_paged {CONTRACTS} torch_ops bad_constructors"),
    (
        r"simd/kv_|ref/kv_|kv_layout|kv_cache|kv_paged|kv_pages|append",
        f"c:test_core {CACHE} prefill_attention fused {CONTRACTS} torch_ops",
    ),
    (r"w4|quantize", f"c:test_core {WEIGHTS} checkpoints {CONTRACTS} torch_ops"),
    (r"product", f"{WEIGHTS} {LINEAR} {CONTRACTS}"),
    (r"gemm|nn\.py", f"{WEIGHTS} {LINEAR} checkpoints {CONTRACTS} torch_ops"),
    (r"linear", f"{LINEAR} {CONTRACTS}"),
    (r"norm|rope|activat|softmax|fused|rows\.h", f"{FUSED} c:test_w4a16 w4a16 {LINEAR} {CONTRACTS} torch_ops"),
    (r"loaders|checkpoints", FILES),
    (r"integrations", "transformers checkpoints checkpoints_refused gguf cli"),
    (r"_arrays|torch_ops", f"arrays dlpack torch_ops kv_cache kv_cache_paged w4a16_modules {FUSED} {CONTRACTS}"),
    (
        r"",
        f"c:test_core c:test_plan {ATTENTION} {FUSED} {LINEAR} c:test_w4a16 w4a16 c:test_ops_kv_cache kv_cache"
        f" kv_cache_arguments env imports arrays {CONTRACTS} bad_constructors",
    ),
)


def tests_for(file):
    for pattern, tests in RULES:
        if re.search(pattern, file):
            return list(dict.fromkeys(tests.split()))
    raise AssertionError(file)
