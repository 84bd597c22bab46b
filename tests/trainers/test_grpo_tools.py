"""Tools and environments: turns of the policy with results in between, scored on shared rows as TRL scores them."""

import importlib.resources
import random

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import unsloth_trl
from tests.numerics import assert_runs_close
from tests.tiny import lora_config, tiny_model
from tests.trainers.grpo_runs import run_grpo


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": %d, "b": 4}}\n</tool_call><|im_end|>'


def byte_tokenizer():
    """One token per byte and Qwen 3's chat template, which renders tools and whose tool calls TRL parses."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    templates = importlib.resources.files("trl").joinpath("chat_templates")
    tokenizer.chat_template = templates.joinpath("qwen3.jinja").read_text(encoding="utf-8")
    return tokenizer


def with_turns(parent):
    """`parent` with turns made up: two of three first turns call the tool, and so does one second turn."""

    class Turns(parent):
        turns = 0

        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, **_):
            rng = random.Random(f"turn {self.turns}")
            self.turns += 1
            called = [rng.random() < (0.66 if self.turns % 3 == 1 else 0.3) for _ in prompt_ids]
            texts = [CALL % rng.randint(1, 9) if call else "it is " + "x" * rng.randint(1, 20) for call in called]
            ends = ["" if call or rng.random() < 0.2 else "<|im_end|>" for call in called]
            return [self._tokenizer.encode(text + end) for text, end in zip(texts, ends, strict=True)], None

    return Turns


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first one.
        b: The second one.

    Returns:
        Their product.
    """
    return a * b


class Environment:
    """Keeps the results of its tool; the reward is their sum."""

    def reset(self, **kwargs):
        self.total = 0
        return " Begin."

    def multiply(self, a: int, b: int) -> int:
        """
        Multiplies two integers.

        Args:
            a: The first one.
            b: The second one.

        Returns:
            Their product.
        """
        self.total += a * b
        return a * b

    def get_reward(self):
        return float(self.total)


def lengths(completions, completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize("given", ["tools", "environment_factory"])
@pytest.mark.parametrize("mask_truncated", [False, True])
def test_turns_with_tool_results_equal_trl(given, mask_truncated):
    runs = []
    for library in (unsloth_trl, trl):
        init = {
            "rollout_func": None,
            "processing_class": byte_tokenizer(),
            "train_dataset": Dataset.from_dict(
                {"prompt": [[{"role": "user", "content": f"{i} * 4?"}] for i in range(8)]}
            ),
            "peft_config": lora_config("llama"),
            **({"tools": [multiply], "reward_funcs": lengths} if given == "tools" else {}),
            **({"environment_factory": Environment, "reward_funcs": None} if given != "tools" else {}),
        }
        torch.manual_seed(0)
        runs.append(
            run_grpo(
                library,
                tiny_model("llama", vocab_size=288, max_position_embeddings=4096),
                init=init,
                trainer_class=with_turns(library.GRPOTrainer),
                max_completion_length=400,
                learning_rate=0.2,
                beta=0.1,
                mask_truncated_completions=mask_truncated,
            )
        )
    assert_runs_close(*runs, 1e-4)
    ours = runs[0].trainer
    assert ours.state.log_history[0]["tools/call_frequency"] > 0.2
    assert ours.state.log_history[0]["tools/failure_frequency"] == 0
    counts = ours.token_counts
    assert 0 < counts.shared < 0.5 * counts.unshared, "the prompt is long: it describes the tool"
    assert all(entry["grad_norm"] > 0 for entry in runs[0].logs)
