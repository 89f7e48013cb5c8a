version: str = "0.1.0"

binding_mode: str = "split"

def cpu_variants() -> str: ...
def gpu_backend() -> str: ...
def parallel_backend() -> str: ...
def parallel_threads() -> int: ...
def decode_attention(
    q: object | None,
    cache: object | None,
    out: object | None,
    lse: object | None,
    rows: object | None,
    counts: object | None,
    scale: object | None,
    window: object | None,
    softcap: object | None,
    sinks: object | None,
    workspace: object | None,
    stream: object | None,
    plan: object | None,
) -> str: ...
def decode_workspace(q: object | None, cache: object | None) -> int: ...
def prefill_attention(
    q: object | None,
    k: object | None,
    v: object | None,
    out: object | None,
    lse: object | None,
    causal: bool,
    scale: object | None,
    window: object | None,
    softcap: object | None,
    sinks: object | None,
    alibi_slopes: object | None,
    cu_seqlens_q: object | None,
    cu_seqlens_k: object | None,
    cache: object | None,
    rows: object | None,
    counts: object | None,
    stream: object | None,
    plan: object | None,
) -> str: ...
def merge_attention(
    out_a: object | None,
    lse_a: object | None,
    out_b: object | None,
    lse_b: object | None,
    out: object | None,
    lse: object | None,
    stream: object | None,
    plan: object | None,
) -> str: ...
def rms_norm(
    x: object | None,
    weight: object | None,
    eps: object | None,
    out: object | None,
    stream: object | None,
    plan: object | None,
) -> str: ...
def add_rms_norm(
    x: object | None,
    residual: object | None,
    weight: object | None,
    eps: object | None,
    out: object | None,
    residual_out: object | None,
    stream: object | None,
    plan: object | None,
) -> str: ...
def layer_norm(
    x: object | None,
    weight: object | None,
    bias: object | None,
    eps: object | None,
    out: object | None,
    stream: object | None,
    plan: object | None,
) -> str: ...
def add_layer_norm(
    x: object | None,
    residual: object | None,
    weight: object | None,
    bias: object | None,
    eps: object | None,
    out: object | None,
    residual_out: object | None,
    stream: object | None,
    plan: object | None,
) -> str: ...
def rope(
    q: object | None,
    k: object | None,
    cos: object | None,
    sin: object | None,
    positions: object | None,
    q_out: object | None,
    k_out: object | None,
    stream: object | None,
    plan: object | None,
) -> str: ...
def rope_append(
    q: object | None,
    k: object | None,
    v: object | None,
    cos: object | None,
    sin: object | None,
    positions: object | None,
    cache: object | None,
    rows: object | None,
    counts: object | None,
    q_out: object | None,
    stream: object | None,
    plan: object | None,
) -> str: ...
def silu_mul(gate_up: object | None, out: object | None, stream: object | None, plan: object | None) -> str: ...
def gelu_mul(
    gate_up: object | None, approximate: object | None, out: object | None, stream: object | None, plan: object | None
) -> str: ...
def softmax(x: object | None, out: object | None, stream: object | None, plan: object | None) -> str: ...

class W4Handle:
    def __init__(
        self,
        codes: object | None,
        scales: object | None,
        offsets: object | None,
        perm: object | None,
        n: object | None,
        k: object | None,
        group_size: object | None,
        zeros: object | None,
        scale_dtype: object | None,
        op: str,
    ) -> None: ...

w4_layout_version: int = 1

def w4_sizes(
    op: str, argument: str, n: object | None, k: object | None, group_size: object | None, zeros: object | None
) -> tuple: ...
def check_array(op: str, argument: str, array: object | None) -> None: ...
def w4_pack(
    op: str,
    codes: object | None,
    scales: object | None,
    offsets: object | None,
    zeros: object | None,
    group_size: object | None,
    out_codes: object | None,
    out_scales: object | None,
    out_offsets: object | None,
) -> None: ...
def w4_unpack(w: object | None, codes: object | None, scales: object | None, offsets: object | None) -> None: ...
def w4_quantize(
    weight: object | None,
    group_size: object | None,
    zeros: object | None,
    codes: object | None,
    scales: object | None,
    offsets: object | None,
) -> None: ...
def w4_dequantize(w: object | None, out: object | None) -> None: ...
def w4a16_matmul(
    x: object | None,
    w: object | None,
    bias: object | None,
    activation: object | None,
    residual: object | None,
    out: object | None,
    stream: object | None,
    plan: object | None,
) -> str: ...

class KvCache:
    def __init__(
        self,
        format: object,
        dtype: object,
        page_size: object,
        head_dim: object,
        kv_heads: object,
        max_rows: object,
        max_pages: object,
        pool: object | None,
        k_pool: object | None,
        v_pool: object | None,
        block_table: object | None,
        lengths: object | None,
        ring_k: object | None,
        ring_v: object | None,
        raw_from: object | None,
        op: str = "KVCache",
    ) -> None: ...

def kv_block_bytes(format: object, page_size: object, head_dim: object) -> int: ...
def kv_formats() -> list: ...
def kv_append(
    cache: object | None,
    k: object | None,
    v: object | None,
    rows: object | None,
    counts: object | None,
    stream: object | None,
    plan: object | None,
) -> str: ...
def kv_truncate(cache: object | None, rows: object | None, lengths: object | None) -> None: ...
def kv_reset(cache: object | None, rows: object | None) -> None: ...
def kv_reorder(cache: object | None, index: object | None, move_pages: object) -> None: ...
def kv_copy_row(cache: object | None, src: object | None, dst: object | None, first_page: object) -> None: ...
def kv_copy_pages(cache: object | None, src: object | None, dst: object | None) -> None: ...
def kv_dequantize(
    cache: object | None, row: object, at: object, out_k: object | None, out_v: object | None
) -> None: ...
def kv_dump_codes(cache: object | None, row: object, out_k: object | None, out_v: object | None) -> None: ...
def kv_dump_scales(cache: object | None, row: object, values: object, minima: object, out: object | None) -> None: ...
