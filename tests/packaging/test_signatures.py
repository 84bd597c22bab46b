"""The methods and attributes of TRL and transformers that the trainers build on are as they were when we wrote."""

import ast
import inspect
from pathlib import Path

import pytest
import transformers
import trl
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from unsloth_trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from unsloth_trl.data import PackedDataCollator
from unsloth_trl.trainers.saving import Saving


# Class, method and the parameters that its override relies on, in their order.
OVERRIDDEN = {
    (SFTTrainer, "__init__"): ["self", "model", "args", "data_collator", "train_dataset", "eval_dataset"],
    (SFTTrainer, "_prepare_dataset"): [
        "self",
        "dataset",
        "processing_class",
        "args",
        "packing",
        "formatting_func",
        "dataset_name",
    ],
    (SFTTrainer, "_prepare_inputs"): ["self", "inputs"],
    (SFTTrainer, "_remove_unused_columns"): ["self", "dataset", "description"],
    (SFTTrainer, "floating_point_ops"): ["self", "inputs"],
    (SFTTrainer, "compute_loss"): ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    (SFTTrainer, "training_step"): ["self"],
    (SFTTrainer, "train"): ["self"],
    (SFTTrainer, "log"): ["self", "logs", "start_time"],
    (PackedDataCollator, "__init__"): [
        "self",
        "pad_token_id",
        "padding_free",
        "return_position_ids",
        "pad_to_multiple_of",
        "return_tensors",
    ],
    (PackedDataCollator, "torch_call"): ["self", "examples"],
    (SFTConfig, "__post_init__"): ["self"],
    (GRPOTrainer, "__init__"): ["self", "model", "reward_funcs", "args", "train_dataset", "eval_dataset"],
    (GRPOTrainer, "_prepare_inputs"): ["self", "generation_batch"],
    (GRPOTrainer, "_generate_single_turn"): ["self"],
    (GRPOTrainer, "_compute_loss"): ["self", "model", "inputs"],
    (GRPOTrainer, "_get_per_token_logps_and_entropies"): [
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    ],
    (GRPOTrainer, "_calculate_rewards"): ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    (GRPOConfig, "__post_init__"): ["self"],
}
# Only these may pass on what they do not know with *args and **kwargs.
PASSES_ON = {"__init__", "training_step", "train", "_generate_single_turn", "_get_per_token_logps_and_entropies"}
PARENT = {
    SFTTrainer: trl.SFTTrainer,
    GRPOTrainer: trl.GRPOTrainer,
    PackedDataCollator: DataCollatorForLanguageModeling,
    SFTConfig: trl.SFTConfig,
    GRPOConfig: trl.GRPOConfig,
}
# Methods of the Trainer that parts of the trainers override.
OF_PARTS = {
    (Saving, "_save_checkpoint"): ["self", "model", "trial"],
    (Saving, "_get_output_dir"): ["self", "trial"],
    (Saving, "_push_from_checkpoint"): ["self", "checkpoint_folder"],
    (Saving, "save_model"): ["self", "output_dir", "_internal_call"],
    (Saving, "train"): ["self", "resume_from_checkpoint"],
}
# Attributes without a public name that the sources read.
READ = {
    "_tr_loss": transformers.Trainer,
    "_globalstep_last_logged": transformers.Trainer,
    "_metrics": trl.SFTTrainer,
    "_total_train_tokens": trl.SFTTrainer,
    "_tp_size": trl.SFTTrainer,
    "_buffered_inputs": trl.GRPOTrainer,
    "_step": trl.GRPOTrainer,
    "_tokenizer": trl.GRPOTrainer,
    "_entropy_bonus_enabled": trl.GRPOTrainer,
}


def case_id(case) -> str:
    return f"{case[0].__name__}.{case[1]}"


@pytest.mark.parametrize("case", OVERRIDDEN, ids=case_id)
def test_overridden_method_is_the_one_it_was_written_for(case):
    cls, method = case
    theirs = inspect.signature(getattr(PARENT[cls], method)).parameters
    expected = OVERRIDDEN[case]
    assert list(theirs)[: len(expected)] == expected
    if method not in PASSES_ON:
        assert len(theirs) == len(expected), f"new parameters: {list(theirs)[len(expected) :]}"
        ours = inspect.signature(getattr(cls, method)).parameters
        assert list(ours)[: len(expected)] == expected
        for name in expected:
            assert ours[name].default == theirs[name].default, name


@pytest.mark.parametrize("case", OF_PARTS, ids=case_id)
def test_method_of_a_part_is_the_one_it_was_written_for(case):
    cls, method = case
    expected = OF_PARTS[case]
    for owner in (cls, transformers.Trainer, trl.SFTTrainer, trl.GRPOTrainer):
        names = list(inspect.signature(getattr(owner, method)).parameters)
        if method in PASSES_ON:
            names = names[: len(expected)]
        assert names == expected, owner


@pytest.mark.parametrize("cls", PARENT)
def test_every_override_is_listed_above(cls):
    listed = {method for owner, method in OVERRIDDEN if owner is cls}
    functions = {name for name, value in vars(cls).items() if inspect.isfunction(value)}
    # what dataclass writes
    overriding = {name for name in functions if hasattr(PARENT[cls], name)} - {"__eq__", "__repr__", "__replace__"}
    if cls in (SFTConfig, GRPOConfig):
        overriding.discard("__init__")
    assert overriding == listed


def private_attributes(path: Path, context: type) -> set[str]:
    """Names `_x` of each `self._x` in the file that is read, or written, by `context`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, context) and node.attr.startswith("_")
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


@pytest.mark.parametrize("trainer", [SFTTrainer, GRPOTrainer])
def test_every_private_attribute_that_is_read_is_listed_above(trainer):
    path = Path(inspect.getfile(trainer))
    own = {name for value in vars(inspect.getmodule(trainer)).values() for name in getattr(value, "__dict__", {})}
    own |= {name for part in trainer.__mro__ if part.__module__.startswith("unsloth_trl.") for name in vars(part)}
    theirs = {name for name, owner in READ.items() if issubclass(trainer, owner)}
    read = private_attributes(path, ast.Load) - own
    assert read - private_attributes(path, ast.Store) <= theirs
    # what a trainer both reads and sets of its parent's is not its own
    assert read & private_attributes(Path(inspect.getfile(PARENT[trainer])), ast.Store) <= theirs


@pytest.mark.parametrize("name", READ)
def test_attribute_is_still_set(name):
    owner = READ[name]
    stored = private_attributes(Path(inspect.getfile(owner)), ast.Store)
    assert name in stored, f"{owner.__name__} no longer sets {name}"
