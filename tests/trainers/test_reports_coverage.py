"""Which test holds for which public report: B01 to B88."""

import ast
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]

# A path is one test; anything else says why the fault cannot occur in this package now.
COVERAGE = {
    "B01": [
        "tests/trainers/test_reports_packing.py::test_b01_samples_of_a_row_do_not_see_each_other",
        "tests/trainers/test_reports_packing.py::test_b01_no_gradient_crosses_the_boundary",
        "tests/invariant/test_packed_equals_unpacked.py::test_bfd_equals_unpacked",
    ],
    "B02": ["tests/trainers/test_reports_packing.py::test_b02_whatever_else_is_in_the_batch"],
    "B03": ["tests/trainers/test_reports_packing.py::test_b03_several_packed_rows_in_a_batch_and_the_next_batch"],
    "B04": ["tests/trainers/test_sft.py::test_boundaries_reach_the_collator"],
    "B05": [
        "tests/data/test_collators.py::test_completion_labels_survive_bfd",
        "tests/trainers/test_sft.py::test_a_conversation_trains_the_assistant_only",
    ],
    "B06": [
        "tests/data/test_accounting.py::test_bfd_drops_the_overflow_and_says_how_much",
        "tests/data/test_accounting.py::test_bfd_split_requeues_the_overflow",
    ],
    "B07": ["tests/data/test_accounting.py::test_short_max_length"],
    "B08": [
        "tests/data/test_collators.py::test_pad_to_multiple_of_adds_one_closing_segment",
        "tests/trainers/test_reports_packing.py::test_b08_padding_does_not_change_the_real_tokens",
    ],
    "B09": [
        "tests/trainers/test_reports_packing.py::test_b09_positions_with_several_axes_are_no_boundaries",
        "tests/trainers/test_reports_packing.py::test_b09_a_layout_of_another_batch_is_refused",
    ],
    "B10": [
        "tests/models/test_support.py::test_every_stateful_model_of_transformers_is_named",
        "tests/models/test_support.py::test_stateful_models_do_mix_samples_when_packed",
        "tests/trainers/test_reports_packing.py::test_b10_a_model_with_state_is_refused",
        "tests/trainers/test_sft.py::test_an_architecture_that_loses_the_layout_is_an_error",
    ],
    "B11": ["tests/trainers/test_reports_packing.py::test_b11_eval_loss_does_not_depend_on_eval_packing"],
    "B12": ["tests/trainers/test_reports_packing.py::test_b12_no_mask_over_all_tokens"],
    "B13": ["tests/trainers/test_reports_packing.py::test_b13_the_loss_is_the_mean_over_tokens"],
    "B14": ["tests/trainers/test_reports_loss.py::test_b14_loss_does_not_depend_on_accumulation"],
    "B15": [
        "tests/trainers/test_reports_loss.py::test_b15_each_window_gets_its_own_count",
        "tests/trainers/test_reports_loss.py::test_b15_packed_rows_count_their_labels_and_not_their_boundaries",
    ],
    "B16": ["tests/trainers/test_reports_grpo.py::test_b16_accumulation_over_uneven_completions"],
    "B17": ["tests/trainers/test_reports_loss.py::test_b17_twenty_steps_equal_trl"],
    "B18": [
        "tests/trainers/test_reports_grpo.py::test_b18_left_padding_is_not_seen",
        "tests/trainers/test_reports_grpo.py::test_b18_later_generations_and_evaluation",
        "tests/trainers/test_reports_grpo.py::test_b18_positions_come_from_the_mask",
    ],
    "B19": ["tests/trainers/test_reports_grpo.py::test_b19_the_id_of_padding_does_not_matter"],
    "B20": [
        "tests/trainers/test_reports_grpo.py::test_b20_truncated_completions_leave_the_denominator_too",
        "tests/trainers/test_reports_grpo_sharing.py::test_all_rows_masked",
        "tests/trainers/test_reports_grpo_sharing.py::test_one_micro_batch_of_two_is_masked",
    ],
    "B21": [
        "tests/trainers/test_reports_grpo.py::test_b21_every_batch_that_trl_accepts",
        "tests/trainers/test_reports_grpo_sharing.py::test_groups_across_micro_batches",
    ],
    "B22": ["tests/trainers/test_reports_grpo.py::test_b22_completions_at_the_cap"],
    "B23": [
        "tests/trainers/test_reports_grpo.py::test_b23_the_batch_size_is_kept",
        "tests/trainers/test_reports_grpo.py::test_b23_groups_that_do_not_fit_are_refused",
    ],
    "B24": [
        "tests/trainers/test_reports_grpo.py::test_b24_one_empty_completion",
        "tests/trainers/test_reports_grpo.py::test_b24_all_completions_are_empty",
        "tests/trainers/test_reports_grpo.py::test_b24_empty_completions_among_others",
    ],
    "B25": [
        "tests/trainers/test_reports_grpo_rewards.py::test_b25_advantages_and_whose_they_are",
        "tests/trainers/test_reports_grpo_sharing.py::test_equal_rewards_teach_nothing",
    ],
    "B26": [
        "tests/trainers/test_reports_grpo_rewards.py::test_b26_a_wrong_number_of_rewards",
        "tests/trainers/test_reports_grpo_rewards.py::test_b26_none_is_left_out",
        "tests/trainers/test_reports_grpo_rewards.py::test_b26_numbers_of_numpy_and_torch",
        "tests/trainers/test_reports_grpo_rewards.py::test_b26_an_async_reward",
        "tests/trainers/test_reports_grpo_rewards.py::test_b26_after_a_reward_that_raised",
    ],
    "B27": ["tests/trainers/test_reports_grpo_rewards.py::test_b27_sequence_ratios_with_a_loss_over_tokens"],
    "B28": [
        "tests/trainers/test_reports_grpo_rewards.py::test_b28_the_ratio_of_a_sequence",
        "tests/trainers/test_reports_grpo_rewards.py::test_b28_the_ratio_of_a_sequence_to_its_sampler",
    ],
    # TRL has no correction for truncated sampling, and this package none of its own: the test says what comes out
    "B29": ["tests/trainers/test_reports_grpo_rewards.py::test_b29_the_ratio_to_the_sampler_is_trl_s"],
    "B30": [
        "tests/trainers/test_reports_grpo_adapters.py::test_b30_the_reference_is_the_adapter_that_training_started_from",
    ],
    "B31": [
        "tests/trainers/test_reports_grpo_adapters.py::test_b31_an_adapter_on_the_head_is_refused",
        "tests/trainers/test_reports_grpo_adapters.py::test_b31_a_head_that_is_trained_whole",
    ],
    "B32": ["tests/trainers/test_reports_grpo.py::test_b32_several_samples_and_micro_batches"],
    # no synchronisation of our own: the test is TRL's, from our patched layers
    "B33": ["tests/trainers/test_reports_grpo_adapters.py::test_b33_weights_for_the_generator"],
    "B34": [
        "tests/trainers/test_reports_grpo.py::test_b34_a_batch_size_that_could_shrink_is_refused",
        "tests/trainers/test_reports_grpo.py::test_b34_packed_rows_stay_when_the_batch_shrinks",
    ],
    "B35": [
        "tests/trainers/test_reports_grpo_adapters.py::test_b35_a_resumed_run_goes_on",
        "tests/trainers/test_resume.py::test_killed_and_resumed",
        "tests/trainers/test_resume.py::test_grpo_from_each_step",
        "tests/trainers/test_resume.py::test_without_the_completions_the_cycle_goes_on_and_says_so",
    ],
    "B36": [
        "tests/trainers/test_reports_grpo_sharing.py::test_b36_sharing_changes_nothing",
        "tests/trainers/test_reports_grpo_sharing.py::test_b36_two_groups_with_the_same_prompt",
        "tests/trainers/test_reports_grpo_sharing.py::test_b36_shuffled_rows",
        "tests/trainers/test_reports_grpo_sharing.py::test_b36_one_completion_for_a_prompt",
        "tests/trainers/test_reports_grpo_sharing.py::test_b36_prompts_of_one_token",
        "tests/trainers/test_reports_grpo_sharing.py::test_b36_attention_dropout_falls_back",
        "tests/trainers/test_reports_grpo_sharing.py::test_a_prompt_longer_than_a_pass",
    ],
    "B37": [
        "tests/trainers/test_moe_training.py::test_b37_every_adapter_of_every_expert_moves",
        "tests/patches/test_moe.py::test_lora_on_experts_is_what_peft_computes",
    ],
    "B38": [
        "tests/trainers/test_reports_moe.py::test_b38_b40_every_expert_is_merged",
        "tests/trainers/test_reports_moe.py::test_b38_a_delta_that_does_not_fit_is_an_error",
    ],
    "B39": ["tests/patches/test_moe.py::test_narrow_and_square_experts"],
    "B40": ["tests/trainers/test_reports_moe.py::test_b38_b40_every_expert_is_merged"],
    "B41": [
        "tests/trainers/test_reports_moe.py::test_b41_values_go_to_the_odd_columns",
        "tests/patches/test_moe.py::test_activations_are_recognised",
    ],
    "B42": [
        "tests/trainers/test_reports_moe.py::test_b42_routing_weights_are_the_scores_without_the_bias",
        "tests/trainers/test_moe_training.py::test_b42_the_correction_bias_chooses_and_does_not_weigh",
    ],
    "B43": [
        "tests/models/test_targets.py::test_names_of_dense_layers_reach_the_experts",
        "tests/models/test_targets.py::test_a_target_that_matches_nothing_is_refused",
        "tests/trainers/test_moe_training.py::test_b43_names_of_dense_layers_train_the_experts",
    ],
    "B44": [
        "tests/trainers/test_reports_moe.py::test_b44_the_balance_counts_no_padding",
        "tests/invariant/test_packed_equals_unpacked.py::test_bfd_equals_unpacked",
    ],
    "B45": ["tests/trainers/test_moe_training.py::test_adapters_on_disk_are_those_of_peft"],
    "B46": [
        "tests/patches/test_moe_op.py::test_all_tokens_to_one_expert",
        "tests/patches/test_moe_op.py::test_one_token_and_none",
    ],
    "B47": [
        "tests/trainers/test_checkpoint_policies.py::test_b47_page_locking_that_fails",
        "tests/trainers/test_checkpoint_policies.py::test_b47_less_host_memory_than_needed",
        "tests/patches/test_host_slab.py::test_page_locking_that_fails_leaves_pageable_memory_and_one_warning",
    ],
    "B48": ["tests/trainers/test_reports_grpo_adapters.py::test_b48_checkpointing_with_an_adapter"],
    "B49": [
        "tests/patches/test_checkpoint.py::test_b49_tensors_in_keyword_arguments",
        "tests/patches/test_checkpoint.py::test_other_architectures",
    ],
    "B50": [
        "tests/patches/test_checkpoint.py::test_b50_called_in_every_way_that_torch_checkpoint_is",
        "tests/patches/test_checkpoint.py::test_b50_what_it_cannot_do_raises",
    ],
    "B51": ["tests/trainers/test_ddp.py::test_b51_checkpointing_under_ddp"],
    "B52": ["tests/patches/test_checkpoint.py::test_b52_each_device_has_its_own_memory"],
    "B53": ["tests/trainers/test_checkpoint_policies.py::test_b53_checkpointing_can_be_turned_off"],
    "B54": [
        "tests/models/test_loading.py::test_b54_b55_a_quantised_checkpoint_is_read_byte_for_byte",
        "tests/models/test_loading.py::test_b54_scales_in_bf16_are_read_as_numbers",
    ],
    "B55": ["tests/models/test_loading.py::test_b54_b55_a_quantised_checkpoint_is_read_byte_for_byte"],
    "B56": [
        "tests/hub/test_merge_quantized.py::test_b56_base_that_the_adapter_saw_and_original",
        "tests/hub/test_merge_quantized.py::test_b56_the_original_has_to_be_there",
        "tests/test_cli_export.py::test_b56_merged_with_what_the_adapter_was_trained_on",
    ],
    "B57": [
        "tests/hub/test_merge_quantized.py::test_b57_four_bits_become_sixteen",
        "tests/hub/test_merge_quantized.py::test_b57_four_bits_again_only_with_force",
    ],
    "B58": [
        "tests/models/test_loading_adapters.py::test_b58_a_padded_matrix_never_shrinks",
        "tests/hub/test_merge.py::test_b58_no_row_of_the_vocabulary_is_lost",
    ],
    "B59": [
        "tests/models/test_loading_adapters.py::test_b59_an_adapter_with_new_tokens_is_read_by_its_path",
        "tests/models/test_loading_adapters.py::test_b59_new_rows_that_the_adapter_trains_by_themselves",
    ],
    "B60": [
        "tests/hub/test_card.py::test_b60_an_adapter_names_the_repository_and_not_the_cache",
        "tests/hub/test_card.py::test_b60_a_local_base_is_said_in_the_card",
        "tests/hub/test_card.py::test_b60_what_is_a_path",
        "tests/hub/test_card.py::test_b60_a_folder_that_looks_like_a_repository",
        "tests/hub/test_card.py::test_b60_the_name_in_the_adapter_counts_first",
        "tests/hub/test_hub.py::test_b60_pushed_files_name_the_repository_of_the_base",
        "tests/hub/test_hub.py::test_b60_a_local_base_is_warned_of",
        "tests/hub/test_card.py::test_b60_a_gguf_file_as_the_base",
    ],
    "B61": [
        "tests/data/test_responses.py::test_b61_a_trainer_learns_answers_and_their_ends",
        "tests/data/test_responses.py::test_b61_markers_that_leave_out_the_end",
        "tests/data/test_responses.py::test_b61_one_bos_and_one_eos",
        "tests/data/test_responses.py::test_b61_eos_is_learned_without_any_mask",
    ],
    "B62": [
        "tests/hub/test_hub.py::test_b62_a_repository_gets_one_kind",
        "tests/hub/test_hub.py::test_b62_a_folder_that_is_pushed_has_one_kind",
        "tests/models/test_loading_adapters.py::test_b62_a_folder_with_a_model_and_an_adapter",
        "tests/hub/test_merge_folders.py::test_b62_one_folder_holds_one_kind",
        "tests/test_cli_export.py::test_b62_a_folder_with_two_kinds_is_refused",
        "tests/hub/test_card.py::test_b62_a_folder_with_the_other_kind_is_said_before_training",
    ],
    "B63": [
        "tests/hub/test_hub.py::test_b63_a_trainer_pushes_to_a_repository_that_was_private_first",
        "tests/hub/test_hub.py::test_b63_the_pushed_adapter_is_whole",
        "tests/hub/test_hub.py::test_b63_merged_weights_are_whole",
        "tests/hub/test_hub.py::test_b63_gguf_files_come_with_the_tokenizer",
        "tests/hub/test_hub.py::test_b63_the_token_is_in_no_pushed_file",
        "tests/hub/test_card.py::test_b63_the_token_is_in_no_file_and_not_printed",
        "tests/hub/test_card.py::test_b63_training_args_of_a_run",
        "tests/hub/test_merge.py::test_b63_everything_that_a_model_needs",
    ],
    "B64": [
        "tests/hub/test_llama_cpp.py::test_b64_the_quantizer_is_found_and_run",
        "tests/hub/test_llama_cpp.py::test_b64_on_path_and_in_the_working_directory",
        "tests/hub/test_llama_cpp.py::test_b64_the_converter_is_found_and_named",
        "tests/hub/test_llama_cpp.py::test_b64_missing_is_an_error_before_merging",
        "tests/hub/test_llama_cpp.py::test_b64_not_executable",
        "tests/hub/test_llama_cpp.py::test_b64_the_merged_folder_is_kept_on_failure",
    ],
    "B65": [
        "tests/hub/test_modelfile.py::test_renders_what_the_tokenizer_renders",
        "tests/hub/test_modelfile.py::test_b65_the_stop_token_is_eos",
        "tests/hub/test_modelfile.py::test_b65_a_template_without_eos_and_a_tokenizer_without_one",
        "tests/hub/test_gguf_vocabulary.py::test_b65_the_eos_id_is_that_of_the_config",
    ],
    "B66": [
        "tests/hub/test_merge_folders.py::test_b66_shards_as_large_as_the_base_s",
        "tests/hub/test_merge_folders.py::test_b66_a_folder_with_old_shards",
        "tests/hub/test_merge_folders.py::test_b66_the_folder_of_the_base_is_refused",
    ],
    "B67": ["tests/hub/test_merge_folders.py::test_b67_no_connection_is_made"],
    "B68": [
        "tests/hub/test_merge.py::test_b68_scaling",
        "tests/hub/test_merge.py::test_b68_dora",
        "tests/hub/test_merge.py::test_b68_lora_bias",
    ],
    "B69": [
        "tests/hub/test_merge_folders.py::test_b69_a_disk_that_is_too_small",
        "tests/hub/test_merge_folders.py::test_b69_one_file_is_in_memory",
        "tests/hub/test_merge_folders.py::test_b69_a_save_that_fails_leaves_what_was_there",
        "tests/hub/test_merge_folders.py::test_b69_a_save_that_is_killed",
    ],
    "B70": [
        "tests/packaging/test_import.py::test_trains_without_gpu_triton_and_bitsandbytes",
        "tests/packaging/test_import.py::test_trains_with_triton_but_without_gpu",
        "tests/trainers/test_reports_environment.py::test_b70_the_default_config_works_without_a_gpu",
        "tests/trainers/test_sft.py::test_without_arguments",
    ],
    # the only thing that is cached is SmolLM2, by its hash; no source is generated, and tests fail if they leave files
    "B71": [
        "tests/packaging/test_caches.py::test_b71_folders_that_cannot_be_written",
        "tests/packaging/test_caches.py::test_b71_code_beside_a_cached_model_is_not_executed",
        "tests/models/test_smollm2.py::test_resolve_smollm2_names_a_cache_folder_that_cannot_be_written",
        "tests/models/test_smollm2.py::test_download_wheel_rejects_a_tampered_wheel_and_downloads_again",
        "tests/models/test_smollm2.py::test_resolve_smollm2_makes_the_model_once_and_again_when_it_is_damaged",
        "tests/packaging/test_import.py::test_import_has_no_side_effect",
    ],
    "B72": [
        "tests/packaging/test_caches.py::test_b72_processes_that_start_at_once",
        "tests/models/test_smollm2.py::test_resolve_smollm2_from_two_runs_at_once",
        "tests/packaging/test_sources.py::test_rewrites_nothing",
    ],
    "B73": [
        "tests/trainers/test_reports_environment.py::test_b73_a_t4_trains_in_fp16_by_default",
        "tests/trainers/test_reports_environment.py::test_b73_bf16_on_a_t4_is_one_line",
    ],
    "B74": [
        "tests/trainers/test_reports_environment.py::test_b74_fp32_on_a_t4_stays_fp32",
        "tests/trainers/test_reports_environment.py::test_b74_no_autocast_without_either_flag",
        "tests/trainers/test_reports_environment.py::test_b74_precision_does_not_leak_into_the_next_trainer",
        "tests/trainers/test_reports_environment.py::test_b74_large_activations_stay_finite_in_fp32",
    ],
    "B75": [
        "tests/patches/test_moe_gemm.py::test_compiles_within_shared_memory",
        "tests/patches/test_moe_rows.py::test_kernels_compile_for",
        "tests/patches/test_nf4.py::test_kernel_compiles",
    ],
    "B76": [
        "tests/packaging/test_sources.py::test_rewrites_nothing",
        "tests/packaging/test_versions.py::test_too_old_is_named_with_both_versions",
        "tests/packaging/test_signatures.py::test_overridden_method_is_the_one_it_was_written_for",
    ],
    "B77": [
        "tests/packaging/test_import.py::test_import_order_does_not_matter",
        "tests/packaging/test_import.py::test_nothing_of_another_library_is_replaced",
    ],
    "B78": ["tests/patches/test_moe_gemm.py::test_without_tensor_descriptors_plain_loads_run_and_one_warning_says_so"],
    "B79": [
        "tests/patches/test_attention_reports.py::test_b79_a_sink_takes_its_share",
        "tests/patches/test_attention_reports.py::test_b79_sinks_windows_and_packing_together",
        "tests/patches/test_attention.py::test_sinks_take_their_share",
        "tests/patches/test_attention.py::test_softcap_and_sinks_equal_the_formula",
        "tests/patches/test_attention.py::test_impossible_backend_is_named",
        "tests/patches/test_flash_4.py::test_by_name",
    ],
    "B80": [
        "tests/patches/test_attention_reports.py::test_b80_capped_scores",
        "tests/patches/test_attention_reports.py::test_b80_the_cap_of_a_model_is_applied",
        "tests/patches/test_attention_reports.py::test_b80_the_cap_of_the_logits_is_in_the_loss",
        "tests/patches/test_attention.py::test_softcap_values",
        "tests/patches/test_frozen_head.py::test_equals_trls",
    ],
    "B81": [
        "tests/patches/test_fused_attention.py::test_kernels_compile",
        "tests/patches/test_fused_attention.py::test_b81_what_the_small_cards_have",
        "tests/patches/test_fused_attention.py::test_what_it_cannot_do_is_named",
        "tests/patches/test_dispatch.py::test_by_card",
    ],
    "B82": [
        "tests/patches/test_attention_reports.py::test_b82_head_sizes_groups_and_lengths",
        "tests/patches/test_fused_attention.py::test_kernels_interpreted",
        "tests/patches/test_attention.py::test_paths_equal_the_formula",
    ],
    "B83": ["tests/trainers/test_reports_moe.py::test_b83_heads_of_every_size"],
    "B84": ["tests/trainers/test_checkpoint_policies.py::test_b84_grpo_memory_does_not_climb"],
    "B85": [
        "tests/trainers/test_reports_memory.py::test_b85_evaluation_keeps_no_logits",
        "tests/trainers/test_reports_memory.py::test_b85_only_what_is_preprocessed_is_kept",
    ],
    "B86": [
        "tests/trainers/test_reports_loss.py::test_b86_metrics_and_logits_with_the_fused_head",
        "tests/trainers/test_sft_metrics.py::test_compute_metrics",
    ],
    "B87": [
        "tests/trainers/test_reports_memory.py::test_b87_nothing_grows_with_the_number_of_split_patterns",
        "tests/trainers/test_reports_memory.py::test_b87_a_trainer_that_is_gone_leaves_its_model_free",
        "tests/patches/test_checkpoint.py::test_b87_memory_is_bounded_over_many_shapes",
    ],
    "B88": [
        "tests/trainers/test_reports_loss.py::test_b88_entropy_where_labels_are_predicted",
        "tests/trainers/test_reports_loss.py::test_b88_boundaries_are_left_out",
    ],
}


def test_every_report_is_listed():
    assert list(COVERAGE) == [f"B{number:02}" for number in range(1, 89)]


@pytest.mark.parametrize("report", COVERAGE)
def test_the_named_tests_exist(report):
    tests = COVERAGE[report]
    if isinstance(tests, str):
        assert len(tests) > 20, "say why"
        return
    for test in tests:
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_reports_in_test_names_are_listed_here():
    """A test called test_b14_... stands under B14."""
    for path in (ROOT / "tests").rglob("test_*reports*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_b") and node.name[6:8].isdigit():
                assert f"B{node.name[6:8]}" in COVERAGE, node.name
