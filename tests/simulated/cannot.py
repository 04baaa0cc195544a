"""Tests that cannot run on the simulated device, or on CUDA, each with its reason.

What a test itself asks for, and the device's profile lacks, needs no line here: pytest skips a test
whose error comes from there without passing through halfstep.
"""

from __future__ import annotations

import re
from functools import cache

EVERYWHERE: dict[str, tuple[str, ...]] = {
    "Differs by design: the state follows a fused step two updates later.": (
        "scaler/test_skips.py::test_a_run_that_no_scale_helps_leaves_the_scale_where_it_was[fused]",
        "scaler/test_skips.py::test_after_non_finite_losses_the_scale_is_back_at_once[*-1-fused]",
        "scaler/test_skips.py::test_after_non_finite_losses_the_scale_is_back_at_once[*-2-fused]",
        "scaler/test_skips.py::test_after_non_finite_losses_the_scale_is_back_at_once[*-20-fused]",
        "scaler/test_skips.py::test_after_non_finite_losses_the_scale_is_back_at_once[*-3-fused]",
        "scaler/test_skips.py::test_after_non_finite_losses_the_scale_is_back_at_once[*-8-fused]",
        "scaler/test_skips.py::test_after_non_finite_losses_the_scale_is_back_at_once[*-9-fused]",
        "scaler/test_skips.py::test_an_overflow_that_needs_many_steps_down_is_found[fused]",
        "scaler/test_skips.py::test_never_the_same_warning_every_step[fused]",
        "scaler/test_skips.py::test_raise[fused]",
        "scaler/test_skips.py::test_raise_when_the_floor_was_tried_in_vain[fused]",
        "scaler/test_skips.py::test_the_message[fused]",
        "scaler/test_skips.py::test_three_overflows_in_a_row_halve_the_scale[fused]",
    ),
    "Tells halfstep of a lack of the CPU; here the device lacks it.": (
        "scaler/test_lacking_devices.py",
    ),
    "Differs by design: a CPU's new_scale is read at once, a device's needs a scale on a device.": (
        "scaler/test_torch_attributes.py::test_the_scale[True-value*]",
    ),
    "A thread of the test makes tensors on the CPU: a default device is one thread's.": (
        "autocast/test_context.py::test_state_is_per_thread",
        "autocast/test_kernels.py::test_plain_autocast_is_unchanged_in_a_thread_while_ours_is_active",
        "autocast/test_module_rules.py::test_threads_have_policies_of_their_own",
        "autocast/test_use_policy.py::test_a_thread_that_was_there_before_follows",
        "autocast/test_use_policy.py::test_one_that_was_not_entered_is_not_left",
        "autocast/test_use_policy.py::test_threads_without_a_policy_follow",
        "autocast/test_weight_cache.py::test_contexts_of_two_threads_end_by_themselves",
        "watch/test_watch_unseen.py::test_a_mode_that_begins_after_a_step_has_raised_an_error",
        "trace/test_trace.py::test_other_threads_are_not_seen",
    ),
    "Runs a script in a process of its own, without the device.": (
        "diagnose/test_kinds.py::test_the_same_holds_for_a_script[squares_in_half]",
    ),
    "A library that does not know the device leaves the model or the batch on the CPU.": (
        "autocast/test_use_policy.py::test_frameworks_follow[train_with_accelerate]",
        "master_weights/test_libraries.py::test_accelerate",
        "master_weights/test_libraries.py::test_lightning",
        "scaler/test_guard.py::test_frameworks_survive_a_bad_batch",
    ),
    "Counts what the CPU's path costs. Costs on a device: benchmarks/README.md.": (
        "autocast/test_context.py::test_a_context_takes_few_calls",
        "autocast/test_context.py::test_an_op_with_a_small_weight_takes_few_calls",
        "master_weights/test_chunks.py::test_a_chunk_fits_the_cache_of_a_cpu_and_is_a_tenth_elsewhere[sim-expected0]",
        "master_weights/test_chunks.py::test_an_optimizer_that_counts_steps_in_chunks_as_at_once",
        "scaler/test_passes.py::test_gradients_that_are_slow_to_measure_are_checked_in_place",
        "scaler/test_passes.py::test_passes",
        "scaler/test_passes.py::test_passes_of_a_skipped_step",
        "scaler/test_passes.py::test_passes_of_what_costs_one_more",
    ),
    "Is about the CPU: its default dtype, its kernels, or its name.": (
        "autocast/test_sums.py::test_a_convolution_that_onednn_leaves_to_pytorch",
        "autocast/test_casts.py::test_casting_goes_into_lists_and_leaves_the_rest",
        "autocast/test_casts.py::test_float64_is_told",
        "autocast/test_casts.py::test_the_widest_dtype",
        "autocast/test_context.py::test_a_context_left_before_one_inside_it_is_an_error['privateuseone']",
        "autocast/test_context.py::test_a_device_that_is_not_there_is_an_error_not_a_warning[privateuseone]",
        "autocast/test_context.py::test_a_pickled_context_is_the_same_context[torch]",
        "autocast/test_context.py::test_an_index_of_the_device_does_not_matter",
        "autocast/test_context.py::test_any_dtype_will_do_where_autocast_is_off",
        "autocast/test_context.py::test_each_device_has_its_own_policy",
        "autocast/test_context.py::test_off_is_possible_for_devices_whose_kernels_are_out_of_reach",
        "autocast/test_context.py::test_the_device_is_inferred",
        "autocast/test_context.py::test_the_dtype_defaults_to_pytorchs",
        "autocast/test_context.py::test_what_code_reads_of_a_context",
        "autocast/test_custom_ops.py::test_what_the_author_registered_holds_where_no_rule_does",
        "autocast/test_destinations.py::test_the_destination_decides[*-index_add_]",
        "autocast/test_destinations.py::test_the_destination_decides[*-scatter_add_]",
        "autocast/test_differences.py::test_halfstep[C1]",
        "autocast/test_differences.py::test_halfstep[C11]",
        "autocast/test_module_rules.py::test_a_rule_holds_in_its_modules[softmax@head[train,cpu]:lower-expected8]",
        "autocast/test_sums.py::test_a_convolution_adds_a_batch_and_a_window_in_float32",
        "diagnose/test_cures.py::test_the_text_is_the_statement_as_it_is_to_stand[loss = torch.linalg.inv_ex(swap - swap)[0].sum()-loss = torch.linalg.inv_ex(swap - swap + 1e-06 * torch.eye(2))[0].sum()]",
        "tune/test_language_models.py",
        "trace/test_trace.py::test_a_trace_can_be_read_while_it_runs",
        "trace/test_trace.py::test_a_transformer_with_padding",
        "trace/test_trace.py::test_modules_do_not_see_that_they_are_watched",
        "trace/test_trace.py::test_modules_that_differ_in_an_index_share_a_block",
        "trace/test_trace.py::test_ops_are_given_back_to_pytorch",
    ),
    "Compares with torch.autocast, which has no rules for a device in Python.": (
        "autocast/test_custom_function.py::test_torchs_decorator_on_backward_works_too",
        "autocast/test_differences.py::test_pytorch_still_has_it[C7]",
        "autocast/test_kernels.py::test_ours_does_what_pytorch_does_on_the_cpu",
        "autocast/test_module_rules.py::test_outside_of_the_policy_modules_run_as_ever",
        "autocast/test_use_policy.py::test_rules_for_modules",
        "autocast/test_weight_cache.py::test_no_rule_goes_past_the_cache",
        "diagnose/test_absorbed.py::test_a_norm_of_zeros[all rows-autocast1]",
        "diagnose/test_absorbed.py::test_a_norm_of_zeros[one row-autocast1]",
        "diagnose/test_diagnose.py::test_plain_torch_autocast_and_its_scaler",
        "diagnose/test_kinds.py::test_a_program_is_finite_without_its_fault_and_not_with_it[rms_norm_in_half]",
        "diagnose/test_kinds.py::test_a_program_is_finite_without_its_fault_and_not_with_it[squares_in_half]",
        "diagnose/test_kinds.py::test_the_fault_is_named_and_its_cure_can_be_pasted[loop-eps_of_float32]",
        "diagnose/test_kinds.py::test_the_fault_is_named_and_its_cure_can_be_pasted[loop-masks_added]",
        "diagnose/test_kinds.py::test_the_fault_is_named_and_its_cure_can_be_pasted[loop-rms_norm_in_half]",
        "diagnose/test_kinds.py::test_the_fault_is_named_and_its_cure_can_be_pasted[step-eps_of_float32]",
        "diagnose/test_kinds.py::test_the_fault_is_named_and_its_cure_can_be_pasted[step-masks_added]",
        "diagnose/test_kinds.py::test_the_fault_is_named_and_its_cure_can_be_pasted[step-rms_norm_in_half]",
        "diagnose/test_kinds.py::test_the_fault_is_named_and_its_cure_can_be_pasted[step-scale_too_large]",
        "scaler/test_scale_dependent_losses.py::test_it_trains_as_under_torch",
        "trace/test_trace.py::test_under_the_autocast_of_pytorch",
    ),
    "Sparse CSR and nested tensors: not on this device.": (
        "autocast/test_no_kernel.py::test_a_product_with_a_sparse_matrix[*-layout1-*]",
        "scaler/test_gradients.py::test_another_sparse_layout_is_refused_before_anything_changes",
        "scaler/test_unused.py::test_a_layout_that_no_scaler_reads_does_not_stop_an_update",
        "trace/test_trace.py::test_nested_tensors[layout0]",
    ),
    "Reads memory of the host: NumPy, DLPack, shared memory, fork.": (
        "autocast/test_weight_cache.py::test_weights_in_shared_memory_are_not_kept",
        "autocast/test_weight_writes.py::test_a_tensor_that_is_an_array_is_never_kept",
        "autocast/test_weight_writes.py::test_no_cast_is_stale[data.numpy-*]",
        "autocast/test_weight_writes.py::test_no_cast_is_stale[dlpack*]",
        "autocast/test_weight_writes.py::test_no_cast_is_stale[np.asarray-*]",
        "autocast/test_weight_writes.py::test_no_cast_is_stale[numpy-*]",
        "autocast/test_weight_writes.py::test_no_cast_is_stale_after_a_write_through_an_alias[*-array]",
        "autocast/test_weight_writes.py::test_no_cast_is_stale_after_a_write_through_an_alias[*-dlpack]",
        "diagnose/test_inference.py::test_a_bad_output_is_found_whatever_becomes_of_it[numpy uint8-*]",
        "record/test_record.py::test_a_forked_process_writes_nothing",
    ),
    "A gap of the device: see the table in device.py.": (
        "autocast/test_kept_wide.py::test_a_cell_counts_past_what_lower_precision_holds",
        "autocast/test_kept_wide.py::test_a_recurrent_layer_trains",
        "autocast/test_no_kernel.py::test_a_product_with_a_sparse_matrix_in_lower_precision[layout1-*]",
        "autocast/test_context.py::test_recurrent_layers_do_what_they_do_under_torch_autocast",
        "autocast/test_differences.py::test_halfstep[C6]",
        "autocast/test_functorch.py::test_directional_derivatives",
        "autocast/test_islands.py::test_an_island_with_parameters_in_lower_precision[lstm-*-keep]",
        "autocast/test_islands.py::test_an_island_with_parameters_in_lower_precision[lstm-*-rule]",
        "autocast/test_sums.py::test_transforms_give_what_autograd_gives",
        "autocast/test_weight_cache.py::test_forward_mode",
        "autocast/test_weight_cache.py::test_whether_a_cast_is_kept_changes_no_gradient",
        "dtype_errors/test_dtype_errors.py::test_a_module_can_be_kept",
        "dtype_errors/test_dtype_errors.py::test_a_number_that_does_not_fit",
        "dtype_errors/test_dtype_errors.py::test_a_tensor_that_the_traceback_does_not_show",
        "dtype_errors/test_dtype_errors.py::test_hostile_programs",
        "dtype_errors/test_dtype_errors.py::test_nothing_is_written_by_a_try",
        "dtype_errors/test_dtype_errors.py::test_nothing_is_tried_with_other_tensors_than_those_that_failed",
        "dtype_errors/test_dtype_errors.py::test_the_error_of_a_diagnosed_step_has_it_as_a_note",
        "dtype_errors/test_dtype_errors.py::test_the_line_of_an_assignment",
        "dtype_errors/test_dtype_errors.py::test_inside_of_a_package_the_line_is_the_last_of_the_user",
        "dtype_errors/test_dtype_errors.py::test_under_a_default_device",
        "watch/test_loops.py::test_nothing_is_told_of_healthy_steps[truncated]",
        "watch/test_loops.py::test_the_line_and_the_step_are_named_and_nothing_changes[truncated]",
        "replay/test_unseen.py::test_bad_values_are_found_and_good_ones_are_not[<lambda>3]",
        "replay/test_unseen.py::test_bad_values_are_found_and_good_ones_are_not[jvp_returned]",
        "replay/test_unseen.py::test_bad_values_are_found_and_good_ones_are_not[<lambda>3]",
        "watch/test_watch_unseen.py::test_an_evaluation_keeps_few_of_its_batches",
        "master_weights/test_master_weights.py::test_a_model_without_values_steps",
        "scaler/test_gradients.py::test_gradients_that_cannot_be_written_to_are_replaced[conjugate]",
        "scaler/test_gradients.py::test_gradients_that_cannot_be_written_to_are_replaced[negative view]",
    ),
    "Compiles, exports or traces: not on this device.": (
        "autocast/test_sums.py::test_a_traced_model_can_be_saved",
        "autocast/test_use_policy.py::test_compiled_code_is_told_apart_in_a_thread_that_enters_the_policy_too",
        "autocast/test_weight_writes.py::test_no_cast_is_stale[compiled data-*]",
        "watch/test_watch_unseen.py::test_a_compiled_function_is_told_what_shows_it[False]",
    ),
    "Needs a process group of the device.": (
        "autocast/test_islands.py::test_a_module_that_fsdp2_has_wrapped",
        "autocast/test_islands.py::test_copies_and_replicas_run_their_own_weights",
        "autocast/test_module_rules.py::test_wrapped_in_ddp_and_fsdp2",
    ),
    "Differs by design: a device's norm, flag or written scale is not read before its step.": (
        "scaler/test_overrides.py::test_a_scale_that_is_no_scale",
        "scaler/test_changed_gradients.py::test_a_fused_optimizer_that_may_not_write_gradients_back",
        "scaler/test_changed_gradients.py::test_a_norm_that_is_read_late_is_that_of_the_step",
        "scaler/test_outcome.py::test_gradients_that_are_gone_are_not_taken_for_those_of_the_step",
    ),
    "Differs by design: small weights are cached too, for a cast is a launch.": (
        "autocast/test_weight_cache.py::test_small_weights_are_cast_anew",
    ),
    "PyTorch itself fails on a device here: its averages divide integer buffers with foreach.": (
        "scaler/test_buffers.py::test_an_average_between_step_and_update_has_restored_buffers",
    ),
}
"""Tests by reason: a file below tests/, or one of its functions, or one of the function's cases,
where a ``*`` stands for anything."""

WITHOUT_FLOAT64 = {
    "Differs by design: without float64 a norm above 1.8e19 is an overflow (norms.py).": (
        "scaler/test_clipping.py::test_a_norm_whose_square_overflows_is_no_overflow",
        "scaler/test_scale_one.py::test_scale_one_changes_no_gradient_and_skips_what_is_not_finite[*-fused]",
    ),
}

ON_CUDA = {
    "Is about the CPU: its list of ops, what it has kernels for, or how it rounds.": (
        "autocast/test_checkpoint.py::test_a_backward_pass_in_another_thread[True-*]",
        "autocast/test_checkpoint.py::test_plain_autocast_recomputes_as_it_always_did",
        "autocast/test_context.py::test_everything_is_restored_after_an_exception",
        "autocast/test_context.py::test_recurrent_layers_do_what_they_do_under_torch_autocast[*-standard]",
        "autocast/test_context.py::test_the_policy_in_force_can_be_asked_for",
        "autocast/test_custom_function.py::test_under_plain_autocast_backward_runs_under_plain_autocast",
        "autocast/test_kernels.py::test_integers_complex_and_float64_stay",
        "autocast/test_kernels.py::test_standard_runs_every_op_of_the_cpu_list",
        "autocast/test_kernels.py::test_tensors_given_by_keyword_are_cast_too",
        "autocast/test_no_kernel.py::test_eigenvectors_by_iteration[given0]",
        "autocast/test_use_policy.py::test_compiled_code_is_told_apart_in_a_thread_that_enters_the_policy_too",
        "autocast/test_weight_cache.py::test_other_layouts_run_as_under_torch_autocast",
        "autocast/test_weight_cache.py::test_whether_a_cast_is_kept_changes_no_gradient",
        "autocast/test_weight_writes.py::test_no_cast_is_stale[a fused op-*]",
        "dtype_errors/test_dtype_errors.py::test_hostile_programs",
        "master_weights/test_chunks.py::test_a_chunk_fits_the_cache_of_a_cpu_and_is_a_tenth_elsewhere[cuda-*]",
        "record/test_record.py::test_names_order_policy_and_size_of_the_model",
        "scaler/test_norms.py::test_large_gradients_are_not_copied",
        "scaler/test_norms.py::test_small_gradients_are_reduced_together",
        "scaler/test_passes.py::test_gradients_after_a_step_are_unscaled_and_clipped[True-*]",
        "scaler/test_passes.py::test_the_norm_reads_every_gradient_once",
    ),
    "Needs the numbers that a seed gives on the CPU.": (
        "diagnose/test_diagnose.py::test_float16_parameters_without_autocast_are_replayed_in_float32",
        "diagnose/test_kinds.py::test_the_fault_is_named_and_its_cure_can_be_pasted[*discriminator_log]",
        "scaler/test_buffers.py::test_a_mask_that_the_first_call_fills_outlives_a_skipped_first_step",
        "scaler/test_buffers.py::test_a_skip_by_overflow_keeps_the_statistics_as_in_pytorch",
    ),
    "The numbers of a step arrive when they arrive: the warning comes in one of the next steps.": (
        "scaler/test_differences.py::test_ours_is_right[A7]",
        "scaler/test_ledger.py::test_clipping_too_early_is_noticed_after_skipped_steps",
        "scaler/test_ledger.py::test_clipping_too_early_is_noticed_with_a_replaced_method",
    ),
    "PyTorch's fused SGD rounds the last bit differently if it divides by a scale.": (
        "scaler/test_training.py::test_optimizers_against_float32[*-False-SGD-fused]",
    ),
    "An index that is out of range ends the process's use of the device.": (
        "autocast/test_differences.py::test_halfstep[C10]",
        "autocast/test_differences.py::test_pytorch_still_has_it[C10]",
    ),
    "PyTorch fails on tensors of the test: a default device is a mode, and NumPy is the CPU's.": (
        "watch/test_watch_unseen.py::test_an_evaluation_keeps_few_of_its_batches",
        "master_weights/test_master_weights.py::test_a_model_without_values_steps",
        "record/test_diagnoses.py::test_the_step_is_the_one_that_has_ended_or_that_an_optimizer_makes_now",
        "record/test_record.py::test_counting_rules_changes_no_number",
    ),
}
"""Seen on one H200 with PyTorch 2.11."""

WITH: dict[str, dict[str, tuple[str, ...]]] = {
    "mps": WITHOUT_FLOAT64,
    "xpu_arc": WITHOUT_FLOAT64,
    "": ON_CUDA,
}
"""The same for single profiles; the empty one is CUDA itself."""

SIMULATED_ONLY = (
    "A gap of the device: see the table in device.py.",
    "Compiles, exports or traces: not on this device.",
    "Sparse CSR and nested tensors: not on this device.",
)
"""What CUDA itself can run."""


def reason(test: str, profile: str) -> str | None:
    """Return why a test cannot run, None if it can."""
    file, _, _ = test.partition("::")
    names = {file, test.partition("[")[0], test}
    for reasons in (EVERYWHERE, WITH.get(profile, {})):
        for why, tests in reasons.items():
            if not profile and why in SIMULATED_ONLY:
                continue
            if not names.isdisjoint(tests):
                return why
            if any(each.fullmatch(test) for each in _patterns(tests)):
                return why
    return None


@cache
def _patterns(tests: tuple[str, ...]) -> list[re.Pattern[str]]:
    cases = [test.split("*") for test in tests if "*" in test]
    return [re.compile(".*".join(map(re.escape, parts))) for parts in cases]
