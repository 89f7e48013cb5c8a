# SPDX-License-Identifier: Apache-2.0
"""Bugs that libraries of GPU kernels have had, each with the tests of ours that fail on the like, or the reason why
there is none. test_known_bugs.py holds this table to the tests there are.

A test is "file::function" of tests/python, "Suite.Name" of tests/cpp, or a script below tests/ that CI runs. `reason`
beside tests: what they leave out. Some tests run on a GPU alone (test_cuda.py, test_*_gpu*.py, parts of *_device.py).
"""

from dataclasses import dataclass

NO_NVFP4 = "there are no NVFP4 kernels yet"
NO_PREFILL = "on a GPU there are no prefill kernels yet"


@dataclass(frozen=True)
class Bug:
    what: str
    tests: tuple[str, ...] = ()
    reason: str = ""


def bug(what, *tests, reason=""):
    return Bug(what, tests, reason)


_FAR = "test_many_rows.py::test_the_last_token_alone_lies_far"
_FAR_PAGES = (
    "test_many_rows.py::test_pages_past_32_bits",
    "test_decode_attention_gpu.py::test_pages_past_2_to_the_32_bytes",
)
_LAYOUTS = "test_layout_invariance.py::test_torch_layouts"
_MIXED_LAYOUTS = "test_layout_invariance.py::test_layouts_that_differ"
_REPLAYS = (
    "test_decode_attention_gpu.py::test_graph_replay_follows_lengths_and_tables",
    "test_decode_attention_gpu_many.py::test_every_replay_has_the_bits_of_a_call",
)
_LENGTHS_DIFFER = "test_prefill_attention.py::test_lengths_that_differ"
_ONE_TOKEN = "test_decode_attention.py::test_one_token"
_NOTHING_SEEN = "test_merge_attention.py::test_a_side_that_saw_nothing_is_ignored"
_FAULTS = "test_bad_input.py::test_every_fault_is_a_typed_error"
_CONSTRUCTORS = "test_bad_constructors.py::test_is_refused_by_name"
_W4_REFUSED = "test_w4a16.py::test_bad_input_is_named"
_W4_EXACT = "test_w4a16_device.py::test_exact_data_give_the_rounded_exact_product"
_STORED_BYTES = "test_kv_cache.py::test_bytes_are_the_specified_ones"
_STREAM = "test_cuda.py::test_runs_on_the_current_stream"
_PAGES = "test_decode_attention.py::test_pages_anywhere"
_ARCHITECTURES = "Targets.ARefusalNamesTheGpuAndTheBuild"

BUGS = {
    # ---- 32-bit index overflow
    "B01": bug(
        "offsets of a batch of many thousand rows are multiplied in 32 bits before they are widened",
        "test_many_rows.py::test_decode_past_32_bits_of_outputs",
        _FAR,
    ),
    "B02": bug("a row of a cache with vast strides is written where row 0 lies", *_FAR_PAGES),
    "B03": bug("page number times page stride wraps and other pages are read", *_FAR_PAGES),
    "B04": bug("K and V share a pool, and V's offset alone passes 31 bits", *_FAR_PAGES),
    "B05": bug("append computes the address of a late page in 32 bits", *_FAR_PAGES),
    "B06": bug(
        "a gated activation counts tokens times two hidden sizes in 32 bits",
        "test_cuda.py::test_past_two_to_the_31_elements",
        _FAR,
    ),
    "B07": bug("so does a norm", "test_cuda.py::test_past_two_to_the_31_elements", _FAR),
    "B08": bug("an overflow starts with the last token's offset, so small batches hide it", _FAR),
    "B09": bug("first token times heads times head_dim overflows in a packed batch", _LAYOUTS, _FAR, reason=NO_PREFILL),
    # ---- launch limits
    "B10": bug(
        "a batch above 65,535 exceeds the grid, nothing runs and nobody says so",
        "test_many_rows.py::test_decode_of_many_rows",
        "test_many_rows.py::test_append_to_many_rows",
        "test_cuda.py::test_seventy_thousand_rows",
    ),
    "B11": bug("batch times KV heads does", "test_many_rows.py::test_decode_of_many_rows"),
    "B12": bug(
        "a product of tens of thousands of rows is no valid launch",
        "test_many_rows.py::test_a_product_of_many_rows",
        "test_w4a16_device.py::test_more_tokens_than_are_prepared_at_once",
    ),
    "B13": bug(
        "an empty grid is an error that the next call reports",
        "test_empty.py::test_empty_calls",
        "test_decode_attention_gpu.py::test_empty",
        "test_cuda.py::test_a_bad_call_leaves_nothing_behind",
    ),
    # ---- layout, stride, alignment
    "B14": bug("one kernel of many takes a transposed tensor as contiguous", _LAYOUTS),
    "B15": bug("K is read with V's strides", _MIXED_LAYOUTS),
    "B16": bug("V alone is taken as contiguous", _LAYOUTS, _MIXED_LAYOUTS),
    "B17": bug(
        "rounding a strided weight or cache entry is wrong, on one backend of two",
        _LAYOUTS,
        "test_kv_cache.py::test_inputs_of_any_strides",
        "test_kv_cache_gpu.py::test_inputs_of_any_strides",
    ),
    "B18": bug(
        "a weight whose shape is said the wrong way round multiplies into nonsense",
        _CONSTRUCTORS,
        _W4_REFUSED,
        "W4A16.WrongKernelTensorsAreRefused",
    ),
    "B19": bug(
        "a norm honours the stride of rows but not of elements",
        "test_fused.py::test_any_strides_in_and_out",
        "test_cuda.py::test_the_bits_do_not_depend_on_the_layout",
    ),
    "B20": bug(
        "scales, residuals and outputs are indexed as contiguous",
        _LAYOUTS,
        "test_w4a16_device.py::test_strides_of_every_tensor",
        "test_linear_device.py::test_strides_of_every_tensor",
    ),
    "B21": bug(
        "shared memory is misaligned at hidden sizes with an odd number of warps",
        "test_fused.py::test_norms_of_any_multiple_of_a_vector",
        "test_cuda.py::test_the_bits_do_not_depend_on_the_layout",
    ),
    "B22": bug(
        "only the input's alignment is looked at; the cache's rows of an odd head_dim are not aligned",
        "test_kv_cache.py::test_every_variant_stores_the_same_bytes",
        "test_decode_attention_gpu.py::test_what_is_not_compiled_is_named",
    ),
    "B23": bug(
        "a view's offset into its storage is dropped",
        "test_dlpack.py::test_views_that_start_inside_their_storage",
        _LAYOUTS,
    ),
    "B24": bug(
        "expanded KV heads are read wrong at some lengths",
        "test_prefill_attention.py::test_one_head_of_keys_for_all",
        "test_layout_invariance.py::test_expanded_inputs",
    ),
    "B25": bug(
        "what merges partial results takes one operand's strides for all",
        "test_merge_attention.py::test_every_operand_has_strides_of_its_own",
        _MIXED_LAYOUTS,
    ),
    "B26": bug("the stride of a dimension of size 1 is believed", _LAYOUTS),
    # ---- devices and streams
    "B27": bug(
        "tensors on the second GPU are worked on by the first",
        "test_cuda.py::test_the_current_device_stays",
        "test_cuda.py::test_caches_on_another_device_than_the_current_one",
    ),
    "B28": bug(
        "tensors of two devices in one call",
        "test_cuda.py::test_a_tensor_on_another_device_is_refused_by_name",
        _FAULTS,
    ),
    "B29": bug("a stream out of a pool, not the caller's", _STREAM),
    "B30": bug(
        "the default stream in one preparing step", _STREAM, "test_cuda.py::test_the_first_call_ever_can_be_captured"
    ),
    "B31": bug(
        "importing puts memory on the default GPU", "test_cuda.py::test_nothing_is_made_on_a_gpu_that_nobody_names"
    ),
    # ---- CUDA graphs
    "B32": bug("how a row is split is frozen at capture", *_REPLAYS),
    "B33": bug(
        "a replay differs from the call on one kernel of several",
        "test_cuda.py::test_a_graph_replays_what_eager_computes",
    ),
    "B34": bug("rows without a token are left as they were", _ONE_TOKEN, *_REPLAYS),
    "B35": bug(
        "a length beyond the table, as capture with placeholders has it, is followed",
        "test_decode_attention_gpu.py::test_what_only_the_kernels_see",
    ),
    "B36": bug(
        "the first call allocates or waits, which ends a capture",
        "test_cuda.py::test_the_first_call_ever_can_be_captured",
    ),
    "B37": bug("a check of bounds reads the device from the host", "test_cuda.py::test_the_host_never_waits"),
    "B38": bug("a graph keyed by batch keeps the kernel of another length", *_REPLAYS),
    # ---- head_dim and ratio of heads
    "B39": bug(
        "some ratios of query to KV heads are not compiled", "test_decode_attention.py::test_any_ratio_of_heads"
    ),
    "B40": bug("one ratio is compiled and wrong", "test_decode_attention.py::test_any_ratio_of_heads"),
    "B41": bug("half of the channels are left out", "test_decode_attention.py::test_every_channel_counts"),
    "B42": bug("an exception crosses C and ends the process", _FAULTS, _CONSTRUCTORS),
    # ---- empty things
    "B43": bug("batch 0 is an error", "test_empty.py::test_empty_calls"),
    "B44": bug("no key at all divides by zero", _LENGTHS_DIFFER, _ONE_TOKEN, "test_empty.py::test_empty_calls"),
    "B45": bug(
        "empty sequences inside a packed batch shift the others",
        "test_prefill_attention.py::test_packed_sequences",
        "test_empty.py::test_empty_calls",
    ),
    "B46": bug(
        "a block table without columns, a pool without pages",
        "test_kv_cache.py::test_nothing_at_all",
        "test_decode_attention_gpu_faults.py::test_a_pool_without_pages",
    ),
    # ---- masks and LSE
    "B47": bug(
        "a finite stand-in for minus infinity hides valid logits below it",
        "test_decode_attention_gpu.py::test_logits_far_below_zero",
        "test_decode_attention.py::test_large_logits",
    ),
    "B48": bug("true minus infinity makes NaN of rows that see nothing", _LENGTHS_DIFFER),
    "B49": bug("such rows have lse plus infinity", _LENGTHS_DIFFER, _ONE_TOKEN),
    "B50": bug("NaN only where the first tile has nothing but such rows", _LENGTHS_DIFFER),
    "B51": bug("merging two empty results is NaN", _NOTHING_SEEN),
    "B52": bug("an empty result has a finite lse, or garbage beside minus infinity", _NOTHING_SEEN),
    "B53": bug(
        "lse to base 2 is merged as one to base e",
        _ONE_TOKEN,
        "test_merge_attention.py::test_any_split_is_the_whole",
    ),
    "B54": bug(
        "a mask's constant wins over low logits",
        "test_prefill_attention.py::test_a_query_sees_its_own_keys_only",
        "test_decode_attention_gpu.py::test_logits_far_below_zero",
    ),
    # ---- memory that must not matter
    "B55": bug("0 times NaN from slots past the end", "test_decode_attention.py::test_unused_memory_does_not_matter"),
    "B56": bug(
        "padding tokens write NaN where real ones are read",
        "test_kv_cache.py::test_padding_rows_write_nothing",
        "test_transformers.py::test_padding_is_never_stored",
    ),
    "B57": bug("padding of scales is NaN and used", reason=NO_NVFP4),
    "B58": bug(
        "stale entries of a block table are followed",
        _PAGES,
        "test_kv_cache_paged.py::test_view_of_a_quantised_pool",
    ),
    # ---- tails
    "B59": bug(
        "reads past the last token of a short tile",
        "test_poison.py::test_reads_and_writes_nothing_past_the_end",
        "test_decode_attention.py::test_every_length",
    ),
    "B60": bug(
        "lanes past head_dim take part in minimum and maximum with a 0",
        _STORED_BYTES,
        "test_kv_cache.py::test_every_variant_stores_the_same_bytes",
        "test_kv_cache_gpu.py::test_the_bytes_are_those_of_the_cpu",
    ),
    "B61": bug(
        "rotation reads or writes past the rotated part", "test_fused.py::test_rope_in_place_leaves_the_rest_alone"
    ),
    "B62": bug("the last, partial group has a scale of garbage", _W4_REFUSED, _CONSTRUCTORS),
    "B63": bug(
        "pages that are no multiple of a tile lose their last tokens",
        _PAGES,
        "test_kv_cache_paged.py::test_page_size_of_the_kivi_formats",
    ),
    "B64": bug(
        "one remainder of the length modulo 32 is wrong",
        "test_decode_attention.py::test_every_length",
        reason="every length up to 130; beyond, lengths around each boundary",
    ),
    # ---- splits and workspaces
    "B65": bug(
        "the number of splits changes the value",
        "test_decode_attention_gpu.py::test_tokens_at_once_and_one_by_one",
        "DecodeScheduler.AnyPartitionOfARowIsTheExpressionOfOneCta",
    ),
    "B66": bug(
        "the result depends on the capacity",
        "test_kv_cache.py::test_capacity_and_neighbours_change_nothing",
        "test_decode_attention_gpu.py::test_a_row_does_not_depend_on_its_neighbours",
    ),
    "B67": bug(
        "lse is laid out wrong where heads share keys and rows are split",
        "test_decode_attention_gpu.py::test_as_many_raw_tokens_as_there_can_be",
        _ONE_TOKEN,
    ),
    "B68": bug(
        "lse is not kept for merging where the caller does not ask for it",
        "test_decode_attention.py::test_asking_for_lse_changes_no_bit",
        "test_prefill_attention.py::test_asking_for_lse_changes_no_bit",
    ),
    "B69": bug("calls on two streams share one workspace", "test_cuda.py::test_two_streams_with_one_op"),
    "B70": bug(
        "one kernel needs a workspace of zeros that another has dirtied",
        "test_workspaces.py::test_what_another_op_left_does_not_matter",
        "test_workspaces.py::test_what_lay_in_memory_before_does_not_matter",
    ),
    "B71": bug("scratch is kept from a call of another shape", "test_workspaces.py::test_sizes_that_shrink_and_grow"),
    # ---- packed weights
    "B72": bug(
        "a race in the pipeline: other elements are wrong each time",
        _W4_EXACT,
        "test_w4a16_device.py::test_a_hundred_thousand_products",
    ),
    "B73": bug(
        "one CTA clears the output while others add to it",
        _W4_EXACT,
        "test_poison.py::test_writes_its_own_elements_and_all_of_them",
    ),
    "B74": bug(
        "small groups and a permutation of columns read past the scales",
        _W4_EXACT,
        reason="one GPU: weights cut over several are the caller's",
    ),
    "B75": bug("K that is no multiple of the group fails without a word", _W4_REFUSED, _CONSTRUCTORS),
    "B76": bug("a group size that is not compiled gives NaN", _CONSTRUCTORS, _FAULTS),
    "B77": bug("zero points are off by one", "test_w4a16.py::test_every_code_at_every_zero"),
    "B78": bug("a checkpoint's zero point 0 wraps to 15", "test_checkpoints.py::test_weights_are_those_of_the_format"),
    "B79": bug(
        "zero points that mean nothing are used",
        "test_checkpoints_refused.py::test_symmetric_weights_with_zero_points",
    ),
    "B80": bug("locks and partial sums do not fit their buffer", "test_arrays.py::test_a_workspace_is_not_left"),
    "B81": bug("an architecture nobody compiled for meets its instructions", _ARCHITECTURES, "Targets.WhoRunsABuild"),
    # ---- precision
    "B82": bug("sums of a group overflow fp16", "test_w4a16_device.py::test_sums_beyond_fp16_that_cancel"),
    "B83": bug(
        "a key's scale folded into an fp16 query overflows",
        "test_decode_attention_gpu_faults.py::test_keys_of_a_bf16_cache_beyond_fp16",
    ),
    "B84": bug("a constant channel gets a scale beyond fp16", "test_kv_cache.py::test_constant_groups"),
    "B85": bug("squares overflow fp16", "test_fused.py::test_large_values_do_not_overflow"),
    "B86": bug("eps is raised or dropped", "test_fused.py::test_eps_is_neither_raised_nor_dropped"),
    "B87": bug("a scale underflows on its way through bf16", reason=NO_NVFP4),
    # ---- kivi formats
    "B88": bug(
        "tokens of decode steps never leave the raw part",
        _STORED_BYTES,
        "test_kv_cache.py::test_any_way_of_splitting_leaves_the_same_bytes",
    ),
    "B89": bug(
        "groups of one token: no rounding at all, and bytes counted wrong",
        "test_kv_cache.py::test_any_way_of_splitting_leaves_the_same_bytes",
        "test_kv_cache.py::test_bytes_are_counted",
    ),
    "B90": bug("the newest tokens are rounded too", "test_kv_cache.py::test_dequantize_is_what_a_query_sees"),
    "B91": bug(
        "a group takes tokens of two requests",
        "test_kv_cache.py::test_capacity_and_neighbours_change_nothing",
        "test_kv_cache_gpu.py::test_entries_of_one_call_know_of_each_other",
    ),
    "B92": bug(
        "where scales lie is derived from a shape, not from the strides",
        "test_kv_cache_paged.py::test_view_of_a_quantised_pool",
    ),
    "B93": bug(
        "scales are initialised again by whoever touches the cache first",
        "test_many_rows.py::test_two_views_on_one_pool",
    ),
    "B94": bug("4 bits are asked for, 2 are used", "test_kv_cache.py::test_every_code_occurs_and_comes_back"),
    # ---- window, soft cap, causal
    "B95": bug(
        "a window as long as the row is not causal attention",
        "test_decode_attention.py::test_a_window_past_the_row_changes_nothing",
        "test_prefill_attention.py::test_options",
    ),
    "B96": bug(
        "a window counts itself or not",
        "test_decode_attention.py::test_a_window_of_one_is_the_value_itself",
        "test_prefill_attention.py::test_a_window_of_one_is_the_value_itself",
    ),
    "B97": bug(
        "the soft cap's formula is wrong, or it comes after the mask",
        "test_decode_attention.py::test_options",
        "test_prefill_attention.py::test_options",
    ),
    "B98": bug(
        "an argument is taken and ignored",
        "test_arguments_matter.py::test_another_value_changes_the_result",
        "test_row_independence.py::test_a_promise_of_one_order_is_kept_or_refused",
    ),
    "B99": bug("causal is aligned to the wrong end where lengths differ", _LENGTHS_DIFFER),
    # ---- tables and bounds
    "B100": bug(
        "a block table is read past its columns",
        "test_kv_cache_paged.py::test_view_of_an_element_pool",
        "test_kv_cache_gpu.py::test_bad_tables_and_lengths_of_a_view",
    ),
    "B101": bug(
        "a length past the pages is believed",
        "test_kv_cache_paged.py::test_corrupt_lengths_are_refused",
        "test_kv_cache_gpu.py::test_bad_tables_and_lengths_of_a_view",
    ),
    "B102": bug(
        "a page outside the pool is written",
        "test_kv_cache_paged.py::test_view_of_an_element_pool",
        "test_decode_attention.py::test_a_table_that_points_nowhere",
        "test_decode_attention_gpu_faults.py::test_a_row_with_a_bad_page_is_left_alone",
    ),
    "B103": bug(
        "appending past the capacity writes another tensor",
        "test_kv_cache.py::test_bad_append_changes_nothing",
        "test_kv_cache_gpu.py::test_a_full_row_is_left_alone",
    ),
    # ---- NVFP4
    "B104": bug("scales are all zero at some numbers of rows", reason=NO_NVFP4),
    "B105": bug("a scale past the largest number is NaN", reason=NO_NVFP4),
    "B106": bug("rows of zeros have an infinite scale", reason=NO_NVFP4),
    "B107": bug("products after the first of a batch are wrong where rows need padding", reason=NO_NVFP4),
    # ---- races
    "B108": bug(
        "a dependent launch starts before its input is there",
        "test_w4a16_device.py::test_x_that_comes_late",
        "test_cuda.py::test_decode_waits_for_the_node_before_it",
    ),
    "B109": bug(
        "many lanes write and one arrives at the barrier for them",
        "test_w4a16_device.py::test_loads_that_come_late",
        "Tile.LoadsOfFourTiles",
        reason="racecheck looks for it: bench/run_on_gpu.sh runs it over the C++ tests on a GPU",
    ),
    "B110": bug(
        "a stale barrier shows only beside other copies",
        "test_cuda.py::test_products_beside_copies",
    ),
    # ---- packaging and platforms
    "B111": bug("the extension does not load beside another torch", "packaging/check_wheel.sh"),
    "B112": bug("no kernel image for this GPU", _ARCHITECTURES),
    "B113": bug(
        "the driver is too old",
        reason="the driver of a test machine cannot be changed; tensor_map.cpp names what it lacks, and a driver that"
        " CUDA refuses counts as none (test_env.py has one that fails)",
    ),
    "B114": bug("instructions this CPU has not", "test_instruction_sets.py::test_an_older_cpu"),
    # ---- processes, threads, lifetime
    "B115": bug("importing touches CUDA, and a forked child cannot", "test_limits.py::test_a_forked_child_goes_on"),
    "B116": bug(
        "what a process keeps once is changed by two threads",
        "test_workspaces.py::test_threads_side_by_side",
        "test_cuda.py::test_two_threads_with_one_kernel",
    ),
    "B117": bug(
        "other Python threads stand still during a long call",
        "test_kv_cache_host_books.py::test_other_threads_run_while_rows_move",
    ),
    "B118": bug(
        "memory of an argument is handed out again before the kernel has run",
        "test_streams.py::test_memory_of_a_call_belongs_to_the_stream",
        "test_dlpack.py::test_arguments_may_die_right_after_the_call",
    ),
    "B119": bug("a capsule is never given back, or twice", "test_dlpack.py::test_every_capsule_is_given_back_once"),
    "B120": bug("something is kept for every shape", "test_dlpack.py::test_memory_stays_flat_over_many_shapes"),
    # ---- torch.compile
    "B121": bug("every length compiles again", "test_torch_ops.py::test_a_growing_sequence_compiles_twice_at_most"),
    "B122": bug(
        "a stand-in has other strides than the result",
        "test_torch_ops.py::test_opcheck",
        "test_torch_ops.py::test_stand_in_has_the_real_shape_and_strides",
    ),
    "B123": bug(
        "torch's own check leaves strides out on a CPU",
        "test_torch_ops.py::test_stand_in_has_the_real_shape_and_strides",
    ),
    # ---- promises
    "B124": bug(
        "the batch chooses how a row is computed",
        "test_row_independence.py::test_alone_as_in_a_batch",
        "test_decode_attention_gpu_many.py::test_a_row_in_a_batch_has_the_bits_it_has_alone",
        "test_w4a16_device.py::test_bits_do_not_depend_on_the_run_the_neighbours_or_if_asked_the_rows",
    ),
    "B125": bug(
        "two runs differ",
        "test_poison.py::test_same_call_same_bits",
        "test_w4a16_device.py::test_a_hundred_thousand_products",
    ),
    "B126": bug(
        "a promise is asked for, shown as given, and not kept",
        "test_row_independence.py::test_a_promise_of_one_order_is_kept_or_refused",
    ),
}
