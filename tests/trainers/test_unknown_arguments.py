"""Arguments that TRL does not take: refused as TRL refuses them, with what to write instead."""

import dataclasses
import pickle
import re

import pytest
import transformers
import trl

import unsloth_trl
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers import runs
from unsloth_trl import unknown_arguments
from unsloth_trl.models.loading import FastLanguageModel
from unsloth_trl.patches.registry import current_report
from unsloth_trl.unknown_arguments import INSTEAD, INSTEAD_GRPO, INSTEAD_SFT, RENAMED


class Anything:
    def __repr__(self) -> str:  # of a test's name, which has to be the same in all processes
        return "..."


ANYTHING = Anything()


CPU = {"output_dir": "out", "use_cpu": True, "bf16": False}
TRAINERS = {"SFT": unsloth_trl.SFTTrainer, "GRPO": unsloth_trl.GRPOTrainer}
CONFIGS = {"SFT": unsloth_trl.SFTConfig, "GRPO": unsloth_trl.GRPOConfig}
STOCK = {"SFT": (trl.SFTTrainer, trl.SFTConfig), "GRPO": (trl.GRPOTrainer, trl.GRPOConfig)}


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


def refusal(call, *args, **kwargs):
    with pytest.raises(TypeError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def plain_arguments(**fields):
    return transformers.TrainingArguments(**(CPU | fields))


# -- the constructor of a trainer


def test_a_pasted_notebook_gets_one_answer_for_all_of_it(llama):
    tokenizer = tiny_tokenizer()
    pasted = {"dataset_text_field": "text", "max_seq_length": 2048, "dataset_num_proc": 2, "packing": False}
    message = refusal(
        unsloth_trl.SFTTrainer, model=llama, tokenizer=tokenizer, train_dataset=None, args=plain_arguments(), **pasted
    )
    assert message.splitlines() == [
        "SFTTrainer() got 5 unexpected keyword arguments:",
        "  tokenizer=...: write processing_class=...",
        "  dataset_text_field='text': a field of SFTConfig, set dataset_text_field='text' there",
        "  max_seq_length=2048: a field of SFTConfig, set max_length=2048 there",
        "  dataset_num_proc=2: a field of SFTConfig, set dataset_num_proc=2 there",
        "  packing=False: a field of SFTConfig, set packing=False there",
        "TrainingArguments has no such fields: pass args=SFTConfig(dataset_text_field='text', max_length=2048, "
        "dataset_num_proc=2, packing=False, ...) with the arguments that it was given",
    ]


def test_what_the_answer_says_works(tmp_path, llama):
    args = runs.config(tmp_path, dataset_text_field="text", packing=False, max_length=32)
    init = {"train_dataset": runs.dataset(), "processing_class": tiny_tokenizer()}
    assert unsloth_trl.SFTTrainer(model=llama, args=args, **init).args.max_length == 32


@pytest.mark.parametrize(
    ("task", "given", "expected"),
    [
        ("SFT", {"tokenizer": ANYTHING}, "keyword argument 'tokenizer': write processing_class=..."),
        ("GRPO", {"tokenizer": ANYTHING}, "keyword argument 'tokenizer': write processing_class=..."),
        ("SFT", {"packing": True}, "'packing' (True): a field of SFTConfig, set packing=True there"),
        ("SFT", {"random_state": 3407}, "'random_state' (3407): a field of SFTConfig, set seed=3407 there"),
        ("SFT", {"strict": True}, "'strict' (True): a field of SFTConfig, set strict=True there"),
        ("GRPO", {"share_prompts": False}, "a field of GRPOConfig, set share_prompts=False there"),
        ("GRPO", {"packing": True}, "leave it out: packing is a field of SFTConfig, for SFTTrainer"),
        ("GRPO", {"max_seq_length": 512}, "'max_seq_length' (512): TRL's GRPO takes prompts whole: filter"),
        ("GRPO", {"data_collator": ANYTHING}, "leave it out: data_collator is an argument of SFTTrainer"),
        ("SFT", {"reward_funcs": []}, "leave it out: reward_funcs is an argument of GRPOTrainer"),
        ("SFT", {"model_init": ANYTHING}, "pass the model itself, or its name, as model=..."),
        ("SFT", {"peft_conf": 1}, "did you mean 'peft_config'?"),
        ("SFT", {"learnin_rate": 1e-4}, "'learnin_rate' (0.0001): did you mean 'learning_rate' of SFTConfig?"),
        ("GRPO", {"reward_functions": []}, "did you mean 'reward_funcs'?"),
        ("SFT", {"zzz": 1}, "'zzz' (1): see help(SFTConfig)"),
    ],
    ids=str,
)
def test_one_argument(llama, task, given, expected):
    """TRL refuses each of them too, so nothing is lost that works there."""
    message = refusal(TRAINERS[task], llama, **given)
    assert message.startswith(f"{task}Trainer() got an unexpected keyword argument") and expected in message
    (name,) = given
    if name not in ("share_prompts", "strict"):
        assert name in refusal(STOCK[task][0], llama, **given)


def test_nothing_is_done_before_the_refusal(llama):
    report = unsloth_trl.apply_patches(llama)
    try:
        refusal(unsloth_trl.SFTTrainer, llama, tokenizer=tiny_tokenizer())
        assert current_report(llama) is report
    finally:
        report.remove()


@pytest.mark.parametrize("task", ["SFT", "GRPO"])
def test_everything_that_trl_takes_is_taken(task, llama):
    """No name of TRL's constructor is refused; the call fails later, for what it lacks."""
    names = unknown_arguments._parameters(STOCK[task][0])
    trainer = object.__new__(TRAINERS[task])
    unnamed = dict.fromkeys(names - unknown_arguments._parameters(TRAINERS[task]))
    assert len(unnamed) > 5
    unknown_arguments.check_arguments(trainer, TRAINERS[task], CONFIGS[task], None, unnamed)
    assert "zzz" in refusal(
        unknown_arguments.check_arguments, trainer, TRAINERS[task], CONFIGS[task], None, unnamed | {"zzz": 1}
    )


def test_a_constructor_between_ours_and_trls_may_take_more(tmp_path, llama):
    class Noted(trl.SFTTrainer):
        def __init__(self, *args, note, **kwargs):
            super().__init__(*args, **kwargs)
            self.note = note

    class Own(unsloth_trl.SFTTrainer, Noted):
        pass

    init = {"train_dataset": runs.dataset(), "processing_class": tiny_tokenizer(), "note": "kept"}
    assert Own(llama, runs.config(tmp_path), **init).note == "kept"
    assert "did you mean 'note'?" in refusal(Own, llama, runs.config(tmp_path), **init, notes=1)


# -- what is passed for args


@pytest.mark.parametrize(
    ("task", "args", "expected"),
    [
        ("SFT", {"packing": True}, "SFTTrainer: args is a dict, which is no config; pass args=SFTConfig(...)"),
        ("SFT", unsloth_trl.SFTConfig, "SFTTrainer: args is SFTConfig, which is no config; pass args=SFTConfig(...)"),
        ("GRPO", "out", "GRPOTrainer: args is a str, which is no config; pass args=GRPOConfig(...)"),
        (
            "GRPO",
            plain_arguments,
            "GRPOTrainer: args is a TrainingArguments, which lacks the fields of GRPOConfig; pass "
            "args=GRPOConfig(...) with the same arguments",
        ),
        ("GRPO", lambda: unsloth_trl.SFTConfig(**CPU), "args is a SFTConfig, which lacks the fields of GRPOConfig"),
        ("SFT", lambda: trl.GRPOConfig(**CPU), "args is a GRPOConfig, whose beta, cache_implementation, "),
    ],
    ids=range(6),
)
def test_args_of_another_kind(llama, task, args, expected):
    made = args() if callable(args) and not isinstance(args, type) else args
    assert expected in refusal(TRAINERS[task], llama, args=made)


def test_training_arguments_are_still_taken_for_sft(tmp_path, llama):
    args = plain_arguments(output_dir=str(tmp_path), report_to="none", learning_rate=0.25)
    init = {"train_dataset": runs.dataset(), "processing_class": tiny_tokenizer()}
    trainer = unsloth_trl.SFTTrainer(llama, args, **init)
    assert type(trainer.args) is unsloth_trl.SFTConfig and trainer.args.learning_rate == 0.25


# -- the configs


@pytest.mark.parametrize(
    ("task", "given", "expected"),
    [
        ("SFT", {"max_seq_length": 2048}, "'max_seq_length' (2048): write max_length=2048"),
        ("SFT", {"max_prompt_length": 64}, "(64): set max_length=..., which limits prompt and completion together"),
        ("SFT", {"tokenizer": ANYTHING}, "'tokenizer': pass processing_class=... to SFTTrainer"),
        ("GRPO", {"tokenizer": ANYTHING}, "'tokenizer': pass processing_class=... to GRPOTrainer"),
        ("SFT", {"peft_config": ANYTHING}, "pass peft_config=... to SFTTrainer"),
        ("SFT", {"evaluation_strategy": "steps"}, "('steps'): write eval_strategy='steps'"),
        ("SFT", {"warmup_ratio": 0.03}, "(0.03): write warmup_steps=0.03"),
        ("SFT", {"group_by_length": True}, "set train_sampling_strategy='group_by_length'"),
        ("SFT", {"group_by_length": False}, "'group_by_length' (False): leave it out"),
        ("SFT", {"num_generations": 4}, "leave it out: num_generations is a field of GRPOConfig, for GRPOTrainer"),
        ("SFT", {"atention_backend": "sdpa"}, "('sdpa'): did you mean 'attention_backend'?"),
        ("GRPO", {"max_prompt_length": 256}, "(256): TRL's GRPO takes prompts whole: filter the long ones out of"),
        ("GRPO", {"max_length": 256}, "(256): TRL's GRPO takes prompts whole"),
        ("GRPO", {"vllm_sampling_params": ANYTHING}, "set temperature=..., top_p=..., top_k=..., min_p=..."),
        ("GRPO", {"unsloth_num_chunks": -1}, "(-1): leave it out: the log-probabilities are computed in chunks"),
        ("GRPO", {"fast_inference": True}, "set use_vllm=True, vllm_mode='colocate'"),
        ("GRPO", {"gpu_memory_utilization": 0.6}, "write vllm_gpu_memory_utilization=0.6"),
        ("GRPO", {"max_completion_len": 3}, "did you mean 'max_completion_length'?"),
        ("GRPO", {"zzz": 1}, "see help(GRPOConfig)"),
    ],
    ids=str,
)
def test_one_field(task, given, expected):
    message = refusal(CONFIGS[task], **CPU, **given)
    assert message.startswith(f"{task}Config() got an unexpected keyword argument") and expected in message
    (name,) = given
    assert name in refusal(STOCK[task][1], **CPU, **given)


def test_several_fields():
    message = refusal(unsloth_trl.GRPOConfig, **CPU, max_prompt_length=256, warmup_ratio=0.1, beta=0.1)
    first, prompt, warmup = message.splitlines()
    assert first == "GRPOConfig() got 2 unexpected keyword arguments:"
    assert prompt.startswith("  max_prompt_length=256: ") and warmup == "  warmup_ratio=0.1: write warmup_steps=0.1"


def test_the_new_name_is_given_too(llama):
    both = refusal(unsloth_trl.SFTConfig, **CPU, max_seq_length=5, max_length=7)
    assert "(5): write max_length=5 alone; max_length is its name now and is given too" in both
    args = unsloth_trl.SFTConfig(**CPU)
    assert "args is its name now and is given too" in refusal(unsloth_trl.SFTTrainer, llama, args, training_args=args)
    assert "'training_args': write args=..." in refusal(unsloth_trl.SFTTrainer, llama, training_args=args)
    tokenizers = {"tokenizer": tiny_tokenizer(), "processing_class": tiny_tokenizer()}
    assert "processing_class is its name now" in refusal(unsloth_trl.SFTTrainer, llama, args, **tokenizers)


@pytest.mark.parametrize("name", ["push_to_hub_token", "hub_user_token", "wandb_api_key"])
def test_secrets_are_not_printed(name):
    message = refusal(unsloth_trl.SFTConfig, **CPU, **{name: "hf_secret"}, zzz=1)
    assert "hf_secret" not in message and "zzz=1" in message


def test_long_values_and_objects_are_not_printed():
    message = refusal(unsloth_trl.SFTConfig, **CPU, max_seq_len="x" * 100, max_seq_length=[1, 2])
    assert "  max_seq_len=...: write max_length=..." in message and "xx" not in message and "[1" not in message


def test_replace_and_from_dict_name_the_field():
    args = unsloth_trl.SFTConfig(**CPU)
    assert "write max_length=7" in refusal(dataclasses.replace, args, max_seq_length=7)
    assert dataclasses.replace(args, max_length=7).max_length == 7
    assert "write eval_strategy='no'" in refusal(
        unsloth_trl.SFTConfig, **(args.to_dict() | {"evaluation_strategy": "no"})
    )


def test_own_config_classes():
    @dataclasses.dataclass
    class More(unsloth_trl.SFTConfig):
        my_option: int = 3

    class Shorter(unsloth_trl.GRPOConfig):
        def __init__(self, folder, **fields):
            super().__init__(folder, use_cpu=True, bf16=False, **fields)

    assert More(**CPU, my_option=4).my_option == 4
    assert "More() got an unexpected keyword argument 'my_optoin' (4): did you mean 'my_option'?" in refusal(
        More, **CPU, my_optoin=4
    )
    assert Shorter(folder="out", beta=0.5).beta == 0.5


def test_a_pickled_config_is_not_looked_at():
    args = unsloth_trl.GRPOConfig(**CPU, beta=0.25)
    assert pickle.loads(pickle.dumps(args)).beta == 0.25


# -- the tables against the installed versions


def names_of_everything():
    parts = [unknown_arguments._names(config) for config in CONFIGS.values()]
    parts += [unknown_arguments._parameters(trainer) for trainer, _ in STOCK.values()]
    return set().union(*parts)


@pytest.mark.parametrize("name", RENAMED)
def test_a_new_name_is_there_and_the_old_one_is_not(name):
    assert RENAMED[name] in names_of_everything() and name not in names_of_everything()


@pytest.mark.parametrize("name", [*INSTEAD, *INSTEAD_SFT, *INSTEAD_GRPO])
def test_what_is_to_be_written_instead_exists(name):
    tables = [(INSTEAD, ("SFT", "GRPO")), (INSTEAD_SFT, ("SFT",)), (INSTEAD_GRPO, ("GRPO",))]
    for table, tasks in tables:
        if name not in table:
            continue
        for task in tasks:
            assert name not in unknown_arguments._names(CONFIGS[task])
            assert name not in unknown_arguments._parameters(STOCK[task][0])
        written = set(re.findall(r"(\w+)=", table[name]))
        assert written <= names_of_everything(), written


# -- FastLanguageModel


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("get_peft_model", {"lora_r": 16}, "unexpected keyword argument 'lora_r'; write r"),
        ("get_peft_model", {"seed": 1}, "write random_state"),
        ("get_peft_model", {"finetune_mlp_modules": True}, "list the layers to train in target_modules; by default"),
        ("get_peft_model", {"finetune_language_layers": False}, "list the layers to train in target_modules"),
        ("get_peft_model", {"max_lora_rank": 64}, "it is for vLLM, which the trainer runs: GRPOConfig(use_vllm=True)"),
        ("get_peft_model", {"task_type": "CAUSAL_LM"}, "leave it out: it is always 'CAUSAL_LM'"),
        ("from_pretrained", {"torch_dtype": "auto"}, "write dtype"),
        ("from_pretrained", {"max_length": 2048}, "write max_seq_length"),
        ("from_pretrained", {"use_cache": False}, "call FastLanguageModel.for_inference(model)"),
        ("from_pretrained", {"low_cpu_mem_usage": True}, "leave it out: weights are always read one by one"),
    ],
    ids=str,
)
def test_arguments_of_the_model(llama, method, given, expected):
    model = llama if method == "get_peft_model" else "no/such-model"
    message = refusal(getattr(FastLanguageModel, method), model, **given)
    assert message.startswith(f"{method}() got an unexpected keyword argument") and expected in message


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("get_peft_model", {"finetune_vision_layers": True}, "finetune_vision_layers=True is not done here: only the"),
        ("from_pretrained", {"unsloth_vllm_standby": True}, "GRPOConfig(use_vllm=True, vllm_enable_sleep_mode=True)"),
        ("from_pretrained", {"fullgraph": True}, "compile_layers='on' in its config"),
        ("from_pretrained", {"num_labels": 2}, "num_labels=2 is not done here: load classifiers with transformers"),
    ],
    ids=str,
)
def test_arguments_of_the_model_that_ask_for_something_else(llama, method, given, expected):
    model = llama if method == "get_peft_model" else "no/such-model"
    with pytest.raises(ValueError, match=re.escape(expected)):
        getattr(FastLanguageModel, method)(model, **given)


def test_arguments_of_a_lora_that_are_taken(llama):
    """Unsloth's notebooks pass these two as None; layers_to_transform has an effect too."""
    model = FastLanguageModel.get_peft_model(tiny_model("llama"), r=4, loftq_config=None, layers_to_transform=[0])
    adapted = {name.split(".layers.")[1][0] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == {"0"}
