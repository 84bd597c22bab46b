"""`GRPOTrainer`: TRL's trainer with every log-probability pass on packed rows in which a group shares its prompt."""

import dataclasses
import functools
import math
from typing import Any

import torch
import trl
from accelerate.logging import get_logger
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel
from trl.extras.profiling import profiling_context
from trl.trainer.utils import split_tensor_dict

from ..config import GRPOConfig
from ..data.shared_prompts import (
    IGNORE,
    Row,
    build_shared_rows,
    count_tokens,
    cut_by_tokens,
    describe_rows,
    find_groups,
    order_rows,
)
from ..models.adapters import needs_whole_rows
from ..models.support import check_sharing
from ..patches.attention.patch import own_attention
from ..patches.config import PatchConfig
from ..patches.registry import apply_patches, base_model, current_report
from ..patches.report import PatchEntry, PatchReport
from ..unknown_arguments import check_arguments
from .compiling import Compiling
from .construction import (
    default_name,
    follow_model,
    keep,
    reach_experts,
    refuse_empty,
    setting,
    take_off_earlier_patches,
)
from .generation_cycle import GenerationCycle
from .planning import MemoryPlanning, settle_policy, why_not_checkpoint
from .publishing import Publishing
from .rollouts import EmptyCompletions


logger = get_logger(__name__)

# what of a micro-batch decides about its rows
_IDS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


@dataclasses.dataclass
class TokenCounts:
    """
    Tokens of all log-probability passes so far, on this process.

    Args:
        shared (`int`): That went through a model.
        unshared (`int`): The same without sharing prompts.
        padded (`int`): The same in TRL's padded rows.
    """

    shared: int = 0
    unshared: int = 0
    padded: int = 0


class GRPOTrainer(GenerationCycle, Publishing, Compiling, MemoryPlanning, trl.GRPOTrainer):
    """
    `trl.GRPOTrainer` in which the prompt of a group goes through the model once per pass, and padding never does. Same
    arguments, same losses, same adapters: rollouts, rewards and all loss mathematics are TRL's.

    The micro-batches of one optimizer step hold the rows that TRL's would, grouped by prompt and balanced by tokens,
    except where the loss depends on which rows are in a micro-batch (`loss_type="bnpo"`, `top_entropy_quantile`, an
    entropy bonus): there they are TRL's.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            As in TRL.
        reward_funcs (*optional*): As in TRL.
        args (`GRPOConfig`, *optional*):
            This package's config, or TRL's own (then with this package's defaults).
        trl_args, trl_kwargs:
            The other arguments of `trl.GRPOTrainer`.

    Attributes:
        patch_report (`PatchReport`): What was applied to the model and what was not.
        token_counts (`TokenCounts`): What sharing has saved so far.

    Raises:
        TypeError: For a keyword that TRL does not take, with what to write instead.
        ValueError: If `strict=True` and the architecture is not verified, or if the train dataset is empty.
    """

    _tag_names = [*trl.GRPOTrainer._tag_names, "unsloth_trl"]
    _counted = ("token_counts",)
    _command, _counted_tokens = "grpo", "prompts and completions, with the time of generation and rewards"

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs=None,
        args: GRPOConfig | trl.GRPOConfig | None = None,
        *trl_args,
        **trl_kwargs,
    ):
        check_arguments(self, GRPOTrainer, GRPOConfig, args, trl_kwargs)
        if args is None:
            args = GRPOConfig(default_name(model, "GRPO"))
        args = follow_model(model, args)
        refuse_empty(trl_args, trl_kwargs)
        self._patched = setting(args, "patches") != "none"
        if self._patched:
            take_off_earlier_patches(model)
            trl_args, trl_kwargs = reach_experts(trl.GRPOTrainer, model, args, trl_args, trl_kwargs)
        self._rows: list[Row] | None = None  # of the micro-batch in `_compute_loss`
        self._buffered_rows: list[tuple[dict[str, Any], list[Row]]] = []  # of each micro-batch in TRL's buffer
        self._described: tuple[Any, Any] = (None, None)  # the last batch described, and its rows
        self._said: set[str] = set()
        self.token_counts = TokenCounts()
        super().__init__(model, reward_funcs, args, *trl_args, **trl_kwargs)
        self._start_publishing()
        self._start_saving()
        self._head_temperature = self.temperature  # as in TRL's head, which keeps the one that it was made with
        if not self._patched:
            self._refusal = "patches='none'"
            self.patch_report = PatchReport(base_model(self.model), [PatchEntry("all", (), self._refusal)])
            return
        if self.rollout_func is not None:
            self.rollout_func = EmptyCompletions(self.rollout_func, self._tokenizer.eos_token_id)
        self._refusal = self._why_not_shared()
        self._keeps_batches = self._why_batches_stay()
        config = PatchConfig.from_args(self.args)
        skip = {"cuda_graphs": "the rows of every batch have other lengths"}
        if self._refusal:
            skip["attention"] = skip["lm_head"] = f"the rows are TRL's: {self._refusal}"
        if (reason := why_not_checkpoint(self.args, self.accelerator)) is not None:
            skip["checkpointing"] = reason
        config = settle_policy(config, self)
        self.patch_report = apply_patches(self.model, config, skip=skip)
        self._start_planning()
        self._start_compiling(config, skip)
        if self.ref_model is not None:
            frozen = skip | {"checkpointing": "it has no backward"}
            reference = apply_patches(self.accelerator.unwrap_model(self.ref_model), config, skip=frozen)
            self._reference = reference, frozen
            entry = PatchEntry("reference model", ("ref_model",), "the same patches", lambda model: reference.remove())
            self.patch_report.add(entry)
        self._report_trainer()

    @property
    def _steps_per_cycle(self) -> int:
        """Optimizer steps after which completions are generated anew, and whole generations have been used up."""
        micro_batches = self.args.steps_per_generation * self.num_iterations
        return micro_batches // math.gcd(micro_batches, self.args.gradient_accumulation_steps)

    def _tokens_trained(self) -> int:
        return self.state.num_input_tokens_seen

    def _why_not_shared(self) -> str | None:
        """Why all passes have to stay TRL's, or `None`."""
        base = base_model(self.model)
        if (whole := needs_whole_rows(self.model)) is not None:
            return whole
        dropout = max((getattr(m, "attention_dropout", 0.0) or 0.0 for m in _attention_modules(base)), default=0.0)
        if dropout:
            return f"attention_dropout={dropout} would draw once for the prompt of a whole group"
        columns = getattr(self.train_dataset, "column_names", None) or ()
        if any(column in columns for column in ("image", "images")):
            return "the dataset has images"
        return check_sharing(
            base.config,
            strict=setting(self.args, "strict"),
            allow_unverified=setting(self.args, "allow_unverified"),
            model=base,
        )

    def _why_batches_stay(self) -> str | None:
        """Why micro-batches keep the rows that TRL shuffles into them, or `None`."""
        if self._refusal:
            return self._refusal
        if self.loss_type == "bnpo":
            return "loss_type='bnpo' divides by the tokens of each micro-batch"
        if self.top_entropy_quantile < 1.0:
            return f"top_entropy_quantile={self.top_entropy_quantile} ranks the tokens of each micro-batch"
        if self._entropy_bonus_enabled:
            return "the entropy bonus is a mean over the tokens of each micro-batch"
        return None

    @property
    def _shares(self) -> bool:
        return setting(self.args, "share_prompts")

    def _report_trainer(self) -> None:
        """List what the trainer itself does, beside the patches in the model."""
        report = self.patch_report
        if self._refusal:
            logger.warning(f"Prompts are not shared: {self._refusal}. Training goes on with TRL's padded rows.")
            report.add(PatchEntry("shared prompts", (), self._refusal))
        elif self._shares:
            report.add(PatchEntry("shared prompts", ("policy, old and reference passes",), "once a group", undo=keep))
        else:
            report.add(PatchEntry("shared prompts", (), "share_prompts=False: rows without padding, prompts repeated"))
        if self._keeps_batches:
            report.add(PatchEntry("micro-batches", (), f"TRL's: {self._keeps_batches}"))
        else:
            how = "balanced by tokens" if setting(self.args, "balance_tokens") else "in random order"
            report.add(PatchEntry("micro-batches", ("_prepare_inputs",), f"groups together, {how}", undo=keep))
        if self.args.torch_compile and not self._refusal:
            logger.warning(
                "torch_compile=True compiles again for almost every batch, whose rows have other lengths: right, but "
                "slow. Set torch_compile=False, or share_prompts=False to compile less often."
            )
        needed = self.args.generation_batch_size // self.num_generations
        if isinstance(self.train_dataset, Dataset) and len(self.train_dataset) < needed:
            logger.warning(
                f"The train dataset has {len(self.train_dataset)} prompts and a generation batch takes {needed}: "
                "train() makes no step. Add prompts, or lower per_device_train_batch_size or steps_per_generation."
            )
        rows, group = self.args.per_device_train_batch_size, self.num_generations
        if self._shares and not self._refusal and rows % group:
            logger.warning(
                f"per_device_train_batch_size={rows} is not a multiple of num_generations={group}: groups are cut, "
                "and a prompt is processed in each micro-batch that has a part of its group. The result is right; "
                f"per_device_train_batch_size={-(-rows // group) * group} shares more."
            )

    def _generate_single_turn(self, *args, **kwargs):
        if not self.use_transformers_continuous_batching or not self._patched:
            return super()._generate_single_turn(*args, **kwargs)
        # its paged cache takes transformers' own attention functions only
        with own_attention(base_model(self.model)):
            return super()._generate_single_turn(*args, **kwargs)

    def _prepare_inputs(self, generation_batch):
        if (again := self._inputs_again()) is not None:
            return again
        return self._before_micro_batch(self._prepared(generation_batch))

    def _prepared(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        self._described = (None, None)
        if self._buffered_inputs is not before:
            self._buffered_rows = []
        if self._refusal or self._buffered_inputs is before or not self.model.training:
            return inputs
        self._buffered_inputs = self._regroup(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _regroup(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of a generation batch with their rows described and, where allowed, in our order."""
        if any(batch.get("num_images") is not None or "pixel_values" in batch for batch in batches):
            return batches
        whole = {key: _join([batch[key] for batch in batches]) for key in batches[0]}
        rows = describe_rows(
            torch.cat([whole["prompt_ids"], whole["completion_ids"]], dim=1),
            torch.cat([whole["prompt_mask"], whole["completion_mask"]], dim=1),
            whole["completion_ids"].shape[1],
        )
        if isinstance(rows, str):
            self._say_once(rows)
            return batches
        if not self._keeps_batches:
            order = order_rows(
                rows,
                find_groups(rows, self._shares),
                rows_per_batch=len(rows) // len(batches),
                batches_per_window=math.gcd(len(batches), self.args.gradient_accumulation_steps),
                balance=setting(self.args, "balance_tokens"),
            )
            whole = {key: _permute(value, order) for key, value in whole.items()}
            rows = [rows[i] for i in order]
            batches = split_tensor_dict(whole, len(batches))
        size = len(rows) // len(batches)
        self._buffered_rows = [(batch, rows[i * size : (i + 1) * size]) for i, batch in enumerate(batches)]
        return batches

    def _compute_loss(self, model, inputs):
        if self._loss_is_trls:
            for batch, rows in self._buffered_rows:
                if all(inputs.get(key) is batch[key] for key in _IDS):
                    self._rows = rows
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._rows = None

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
        **images,
    ):
        """As in TRL: log-probabilities and, if asked for, entropies, `(batch, logits_to_keep)`, 0 for padding."""
        rows = self._refusal
        if rows is None:
            has_images = any(value is not None for value in images.values())
            rows = "the batch has images" if has_images else self._taken_off(model)
        if rows is None:
            rows = self._describe(input_ids, attention_mask, logits_to_keep)
        if isinstance(rows, str):
            self._say_once(rows)
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **images,
            )
        with profiling_context(self, "_get_per_token_logps_and_entropies"):
            return self._score_rows(
                model, input_ids, rows, logits_to_keep, batch_size, compute_entropy, compute_aux_loss
            )

    @functools.cached_property
    def _loss_is_trls(self) -> bool:
        """Whether nothing stands between `_compute_loss` here and TRL's, which scores its inputs as they are."""
        classes = type(self).__mro__
        above = classes[classes.index(GRPOTrainer) + 1 :]
        return next(c for c in above if "_compute_loss" in vars(c)) is trl.GRPOTrainer

    def _describe(self, input_ids, attention_mask, logits_to_keep) -> list[Row] | str:
        if self._rows is not None:
            return self._rows
        # the old and the reference pass have the same batch; a version changes with every write
        batch = (input_ids, attention_mask, logits_to_keep, input_ids._version, attention_mask._version)
        last, rows = self._described
        if last is None or not all(
            a is b or (isinstance(a, int) and a == b) for a, b in zip(batch, last, strict=True)
        ):
            rows = describe_rows(input_ids, attention_mask, logits_to_keep)
            self._described = (batch, rows)
        return rows

    def _taken_off(self, model) -> str | None:
        """Why `model` cannot take packed rows now: its report was removed, or another trainer patched it."""
        report = current_report(self.accelerator.unwrap_model(model))
        if report is None or not report["attention"].applied:
            return "the packed attention of this trainer was taken off its model"
        return None

    def _score_rows(self, model, input_ids, rows, logits_to_keep, batch_size, compute_entropy, compute_aux_loss):
        batch, width = input_ids.shape
        groups = find_groups(rows, self._shares)
        # the policy's pass is one micro-batch, whose backward comes once; experts are balanced over all of its tokens
        if batch_size is None or compute_aux_loss:
            passes = [groups]
        else:
            budget = setting(self.args, "max_tokens_per_pass") or batch_size * width
            passes = cut_by_tokens(rows, groups, budget) or [groups]
        ids = input_ids.flatten()
        log_probs = entropy = aux_loss = None
        for groups in passes:
            packed = build_shared_rows(rows, groups, width, logits_to_keep, all_tokens=compute_aux_loss)
            self._count(rows, groups, packed.num_tokens, width)
            packed = packed.to(ids.device)
            source, position, label, target = packed.split()
            extra = {"attention_mask": packed.weights, "output_router_logits": True} if compute_aux_loss else {}
            with self.accelerator.autocast():
                outputs = model(
                    input_ids=ids[source][None],
                    position_ids=packed.layout.position_ids,
                    packed_layout=packed.layout,
                    fused_lm_head=True,
                    **self._labels(model, ids[label], position, packed.num_tokens),
                    **extra,
                )
            found = [outputs.log_probs, outputs.entropy]
            if found[0].ndim == 2:  # of TRL's head: of all tokens of the row
                found = [None if scores is None else scores[0].index_select(0, position) for scores in found]
            log_probs = _scatter(log_probs, batch * logits_to_keep, target, found[0])
            if compute_entropy:
                entropy = _scatter(entropy, batch * logits_to_keep, target, found[1])
            if compute_aux_loss:
                aux_loss = outputs.aux_loss
        shape = (batch, logits_to_keep)
        return log_probs.view(shape), entropy.view(shape) if compute_entropy else None, aux_loss

    def _labels(self, model, targets: torch.Tensor, position: torch.Tensor, num_tokens: int) -> dict[str, Any]:
        """The labelled tokens of a packed row for the model's head."""
        report = current_report(self.accelerator.unwrap_model(model))
        if not report["lm_head"].applied:
            labels = targets.new_full((num_tokens,), IGNORE).index_copy_(0, position, targets)
            return {"shift_labels": labels[None]}
        scoring = {
            "temperature": self._head_temperature,
            "in_fp32": self.args.cast_lm_head_to_fp32,
            "entropy_gradient": self._entropy_bonus_enabled,
        }
        return {"label_positions": position, "label_targets": targets, "scoring": scoring}

    def _count(self, rows: list[Row], groups: list[list[int]], num_tokens: int, width: int) -> None:
        counts = self.token_counts
        counts.shared += num_tokens
        counts.unshared += sum(count_tokens(rows, [i]) for members in groups for i in members)
        counts.padded += sum(map(len, groups)) * width

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if isinstance(self.rollout_func, EmptyCompletions):
            completion_ids_list = self.rollout_func.restore(completion_ids_list)
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _say_once(self, reason: str) -> None:
        if reason not in self._said and reason != self._refusal:
            self._said.add(reason)
            logger.warning(f"Some batches are scored on TRL's padded rows: {reason}.")


def _attention_modules(model: PreTrainedModel):
    return (module for module in model.modules() if isinstance(getattr(module, "attention_dropout", None), float))


def _join(values: list[Any]) -> Any:
    """The value of a key in the generation batch, from those of its micro-batches."""
    first = values[0]
    if isinstance(first, list):
        return [item for value in values for item in value]
    if isinstance(first, torch.Tensor) and first.ndim:
        return torch.cat(values)
    return first  # the same number, or None, in all of them


def _permute(value: Any, order: list[int]) -> Any:
    if isinstance(value, list):
        return [value[i] for i in order]
    if isinstance(value, torch.Tensor) and value.ndim:
        return value[torch.tensor(order, device=value.device)]
    return value


def _scatter(result, size: int, target: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """`result`, zeros at first, with the scores of the labelled tokens in their places of the batch."""
    result = scores.new_zeros(size) if result is None else result
    return result.scatter(0, target, scores)
