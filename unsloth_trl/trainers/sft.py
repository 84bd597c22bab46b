"""`SFTTrainer`: TRL's trainer on packed batches whose boundaries are computed once, without waiting for the device."""

import contextlib
import copy
from typing import Any

import torch
import trl
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from peft import PeftModel
from transformers import PreTrainedModel, TrainerCallback
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..config import SFTConfig
from ..data.accounting import count_tokens, describe_losses
from ..data.collators import PackedDataCollator
from ..models.adapters import needs_whole_rows
from ..models.support import check_packing
from ..patches.config import PatchConfig
from ..patches.registry import apply_patches, base_model
from ..patches.report import PatchEntry, PatchReport
from ..unknown_arguments import check_arguments
from .compiling import Compiling
from .construction import (
    default_name,
    follow_model,
    keep,
    named_config,
    reach_experts,
    refuse_empty,
    setting,
    take_off_earlier_patches,
)
from .metrics import DeviceMetrics
from .planning import MemoryPlanning, settle_policy, why_not_checkpoint
from .publishing import Publishing
from .saving import Saving


logger = get_logger(__name__)


class _RestoreNanFilter(TrainerCallback):
    """Hands `logging_nan_inf_filter` back to the user's value wherever other code can look at it."""

    def __init__(self, value: bool):
        self.value = value

    def _restore(self, args, state, control, **kwargs):
        args.logging_nan_inf_filter = self.value

    # whichever the Trainer calls first after a micro-step
    on_pre_optimizer_step = on_substep_end = on_step_end = _restore


class SFTTrainer(Saving, Publishing, Compiling, MemoryPlanning, trl.SFTTrainer):
    """
    `trl.SFTTrainer` with packed attention, a head that is told where the labels are, and metrics that stay on the
    device until they are logged. Same arguments, same losses, same adapters.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            As in TRL.
        args (`SFTConfig`, *optional*):
            This package's config, or TRL's own (then with this package's defaults).
        data_collator (`Callable`, *optional*):
            As in TRL. A collator passed here is used as it is, and so are its batches.
        trl_args, trl_kwargs:
            The other arguments of `trl.SFTTrainer`.

    Attributes:
        patch_report (`PatchReport`): What was applied to the model and what was not; `patch_report.remove()` takes it
            out again.

    Raises:
        TypeError: For a keyword that TRL does not take, with what to write instead.
        ValueError: If packing is asked for on an architecture that keeps state between tokens, if `strict=True` and
            the architecture is not verified, or if no label is left in the data.
    """

    _tag_names = [*trl.SFTTrainer._tag_names, "unsloth_trl"]
    _counted = ("_device_metrics",)
    _command, _counted_tokens = "sft", "tokens of the batches, without padding"

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        args: SFTConfig | trl.SFTConfig | None = None,
        data_collator=None,
        *trl_args,
        **trl_kwargs,
    ):
        check_arguments(self, SFTTrainer, SFTConfig, args, trl_kwargs)
        if args is None:
            args = SFTConfig(default_name(model, "SFT"))
        elif not isinstance(args, trl.SFTConfig):
            # as TRL does with plain TrainingArguments, into a config that has the fields looked at here
            args = SFTConfig(**(args.to_dict() | {"hub_token": args.hub_token}))
        args = follow_model(model, args)
        self._patched = setting(args, "patches") != "none"
        if self._patched:
            args = _with_supported_packing(model, args)
            take_off_earlier_patches(model)
            trl_args, trl_kwargs = reach_experts(trl.SFTTrainer, model, args, trl_args, trl_kwargs)
        refuse_empty(trl_args, trl_kwargs)
        super().__init__(model, args, data_collator, *trl_args, **trl_kwargs)
        self._device_metrics = DeviceMetrics(self.accelerator)
        self._modules: list[torch.nn.Module] = []  # of the model being trained, for `training_step`
        self._flops_per_token: float | None = None
        self._start_publishing()
        self._start_saving()
        if not self._patched:
            self.patch_report = PatchReport(base_model(self.model), [PatchEntry("all", (), "patches='none'")])
            return
        config = PatchConfig.from_args(self.args)
        refusal = self._collator_refusal(data_collator)
        skip = {}
        if refusal:
            skip = dict.fromkeys(("attention", "lm_head", "cuda_graphs"), refusal)
        else:
            if not self._packs or not config.packed_metadata or self.args.max_length is None:
                skip["cuda_graphs"] = "batches of few shapes need packed rows, packed_metadata and a max_length"
            static_length = self.args.max_length if config.cuda_graphs != "off" and not skip else None
            self.data_collator = PackedDataCollator.from_trl(
                self.data_collator, cached=config.packed_metadata, static_length=static_length
            )
            self.data_collator.is_static.fill_(config.cuda_graphs == "on")
            if not self._packs:
                skip["attention"] = "no batch is packed, so the model keeps its own attention"
        if (reason := why_not_checkpoint(self.args, self.accelerator)) is not None:
            skip["checkpointing"] = reason
        config = settle_policy(config, self)
        self.patch_report = apply_patches(self.model, config, skip=skip)
        self._start_planning()
        self._start_compiling(config, skip)
        self._report_trainer(refusal)
        self._nan_filter = self.args.logging_nan_inf_filter
        # before the user's callbacks
        self.callback_handler.callbacks.insert(0, _RestoreNanFilter(self._nan_filter))
        declared = getattr(base_model(self.model), "accepts_loss_kwargs", None)
        if not refusal and self._standard_loss and declared is None:
            # the loss below divides by the labels of the window, whatever keywords the model's own forward takes;
            # a class that declares itself keeps what TRL makes of that
            self.model_accepts_loss_kwargs = True

    @property
    def _packs(self) -> bool:
        """Whether any batch of this trainer is flattened."""
        by_samples = self.args.packing_strategy != "wrapped" and (self.args.packing or bool(self.args.eval_packing))
        return self.padding_free or by_samples

    def _collator_refusal(self, own) -> str | None:
        """Why the collator cannot be ours, or `None`. Raises where the batches would then be wrong."""
        parallelism = self.accelerator.parallelism_config
        if own is not None:
            return f"the batches of your own data_collator ({type(own).__name__}) are used as they are"
        if type(self.data_collator) is not DataCollatorForLanguageModeling:
            return f"the batches of {type(self.data_collator).__name__} are used as they are"
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            return "context or sequence parallelism cuts the batches after collation"
        reason = needs_whole_rows(self.model)
        if reason and self._packs:
            raise ValueError(
                f"packing with {reason}, and its samples would see each other; set packing=False and "
                "padding_free=False, or use LoRA"
            )
        if reason and self.model.active_peft_config.is_prompt_learning:
            return f"{self.model.active_peft_config.peft_type.value} moves every position by its virtual tokens"
        return None

    def _report_trainer(self, refusal: str | None) -> None:
        """List what the trainer itself does, beside the patches in the model."""
        report = self.patch_report
        if refusal:
            report.add(PatchEntry("collator", (), refusal))
        else:
            what = "packed rows with their boundaries" if self._packs else "padded rows"
            report.add(PatchEntry("collator", ("data_collator",), f"{what}, labelled positions", undo=keep))
        if refusal or not self.data_collator.cached:
            report.add(PatchEntry("metrics", (), "no labelled positions come with the batches: TRL's path"))
        elif self._standard_loss:
            report.add(PatchEntry("metrics", ("log",), "on the device until they are logged", undo=keep))
        else:
            report.add(PatchEntry("metrics", (), "a loss of your own, label smoothing or DeepSpeed SP: TRL's path"))
        if self.args.logging_nan_inf_filter:
            report.add(PatchEntry("nan filter", ("training_step",), "on the device", undo=keep))
        if self.args.device.type == "cuda" and not self.args.accelerator_config.non_blocking:
            reason = "accelerator_config non_blocking is False: each batch waits for its copy"
            report.add(PatchEntry("non-blocking batch copies", (), reason))

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        if not self._patched or isinstance(dataset, IterableDataset):
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        # first everything up to the labels, so that what packing or truncation takes away can be counted
        uncut = copy.copy(args)
        uncut.max_length, uncut.shuffle_dataset = None, False
        whole = super()._prepare_dataset(dataset, processing_class, uncut, False, formatting_func, dataset_name)
        before = count_tokens(whole)
        if not before.labels:
            describe_losses(before, before, args, packing, dataset_name)  # raises
        cut = super()._prepare_dataset(whole, processing_class, args, packing, None, dataset_name)
        for line in describe_losses(before, count_tokens(cut), args, packing, dataset_name):
            logger.warning(line)
        return cut

    def _remove_unused_columns(self, dataset, description=None):
        dataset = super()._remove_unused_columns(dataset, description)
        ours = isinstance(self.data_collator, PackedDataCollator)
        if ours and isinstance(dataset, Dataset) and dataset.format["type"] is None:
            # the data loader's own view: rows as arrays, not as lists of python ints that become arrays again
            dataset = dataset.with_format("numpy")
        return dataset

    def floating_point_ops(self, inputs):
        """As in the Trainer, which counts the model's parameters anew in every micro-step."""
        if not self._patched or "input_ids" not in inputs:
            return super().floating_point_ops(inputs)
        if self._flops_per_token is None:
            self._flops_per_token = super().floating_point_ops(inputs) / inputs["input_ids"].numel()
        return self._flops_per_token * inputs["input_ids"].numel()

    # A subclass may set other columns; without its boundaries a packed row would be trained as one sample.
    @property
    def _signature_columns(self) -> list[str] | None:
        return self._columns

    @_signature_columns.setter
    def _signature_columns(self, columns: list[str] | None) -> None:
        lost = columns is not None and "seq_lengths" not in columns
        self._columns = [*columns, "seq_lengths"] if lost else columns

    def _prepare_inputs(self, inputs):
        if (again := self._inputs_again()) is not None:
            return again
        inputs = super()._prepare_inputs(inputs)
        layout = inputs.get("packed_layout")
        if layout is not None and "position_ids" not in inputs:
            inputs["position_ids"] = layout.position_ids  # a view of the layout's buffer
        return self._before_micro_batch(inputs)

    @property
    def _standard_loss(self) -> bool:
        """Whether the loss is TRL's own from the fused head: nll without smoothing, or dft."""
        smoothed = self.label_smoother is not None and self.args.loss_type == "nll"
        return self.compute_loss_func is None and not smoothed

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As in TRL; the standard loss leaves its metrics on the device."""
        label_positions = inputs.pop("label_positions", None)
        if label_positions is None or return_outputs or not self._standard_loss:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        mode = "train" if self.model.training else "eval"
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        outputs = model(**inputs, label_positions=label_positions, fused_lm_head=True)
        per_token_loss = -outputs.log_probs
        if self.args.loss_type == "dft":
            per_token_loss = per_token_loss * outputs.log_probs.exp().detach()
        num_labels = label_positions.numel()
        if num_items_in_batch is None:
            loss = per_token_loss.sum() / max(num_labels, 1)
        else:
            loss = per_token_loss.sum() / torch.as_tensor(num_items_in_batch).clamp(min=1)
            if self.args.average_tokens_across_devices:
                # the count is over all ranks, and DDP averages their gradients
                loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        if self.aux_loss_enabled:
            steps = 1 if num_items_in_batch is None else self.current_gradient_accumulation_steps
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps
        self._device_metrics.add(
            mode,
            entropy=outputs.entropy.sum(),
            num_correct=outputs.is_top1.sum(),
            num_labels=num_labels,
            num_tokens=self._num_tokens(inputs),
            aux_loss=outputs.aux_loss,
        )
        return loss

    def _num_tokens(self, inputs: dict[str, Any]) -> torch.Tensor | int:
        """What TRL counts as a batch's tokens."""
        if "attention_mask" in inputs:
            return inputs["attention_mask"].sum()
        layout = inputs.get("packed_layout")
        return inputs["input_ids"].numel() - (0 if layout is None else layout.own_padding)

    def training_step(self, model, *args, **kwargs):
        if not self._patched:
            return super().training_step(model, *args, **kwargs)
        with self._without_repeated_train_call(model):
            loss = super().training_step(model, *args, **kwargs)
        if self._nan_filter:
            # what the Trainer's own filter does, without asking the device: a loss that is not finite counts as the
            # mean since the last log line
            mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
            loss = torch.where(torch.isfinite(loss), loss, mean)
            self.args.logging_nan_inf_filter = False  # until the end of this micro-step, see _RestoreNanFilter
        return loss

    @contextlib.contextmanager
    def _without_repeated_train_call(self, model):
        """The Trainer calls `model.train()` in every micro-step; setting all modules costs more than a look."""
        if not self._modules or not all(module.training for module in self._modules):
            model.train()
            self._modules = list(model.modules())
        model.train = lambda mode=True: model if mode else type(model).train(model, False)
        try:
            yield
        finally:
            del model.train

    def train(self, *args, **kwargs):
        self._modules = []
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._patched:
                self.args.logging_nan_inf_filter = self._nan_filter
            self._modules = []

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for mode in ("train", "eval"):
            self._drain(mode)
        super().log(logs, start_time)

    def _drain(self, mode: str) -> None:
        for row in self._device_metrics.drain(mode):
            self._record(mode, row)

    def _tokens_trained(self) -> int:
        self._drain("train")
        return self._total_train_tokens

    def _progress(self) -> dict[str, int]:
        return {"num_tokens": self._tokens_trained()}

    def _set_progress(self, progress: dict[str, int]) -> None:
        self._total_train_tokens = progress["num_tokens"]

    def _record(self, mode: str, row) -> None:
        """One micro-batch into TRL's own metric lists, as its `compute_loss` would have done."""
        metrics = self._metrics[mode]
        metrics["entropy"].append(row.entropy / row.num_labels if row.num_labels else 0.0)
        metrics["mean_token_accuracy"].append(row.num_correct / row.num_labels if row.num_labels else 0.0)
        if mode == "train":
            self._total_train_tokens += int(row.num_tokens) // self._tp_size
        metrics["num_tokens"] = [self._total_train_tokens]
        if self.aux_loss_enabled:
            metrics["aux_loss"].append(row.aux_loss / row.num_processes)


def _with_supported_packing(model, args):
    """`args`, or a copy of it that does not pack where the support table has not verified packing."""
    wants = [name for name in ("packing", "padding_free", "eval_packing") if getattr(args, name)]
    if not wants:
        return args
    if isinstance(model, str):
        config = named_config(model, args)
    else:
        config = model.config
    if check_packing(
        config,
        strict=setting(args, "strict"),
        allow_unverified=setting(args, "allow_unverified"),
        model=None if isinstance(model, str) else model,
    ):
        return args
    args = copy.copy(args)
    for name in wants:
        setattr(args, name, False)
    return args
