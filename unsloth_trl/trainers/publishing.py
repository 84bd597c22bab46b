"""What both trainers do for the Hub: the model card, the base model's name, and one kind of model in a repository."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from datasets import Dataset
from huggingface_hub.errors import HfHubHTTPError

from ..config import PatchArguments
from ..hub.card import (
    base_of,
    describe_adapters,
    describe_quantization,
    mend_base,
    shown_config,
    warn_of_local_base,
    write_run_card,
)
from ..hub.kinds import refuse_other_kinds, refuse_other_kinds_on_hub
from ..hub.push import save_generation_config
from ..hub.refusals import explain_refusal, refuse_public
from ..models.base_state import save_base_state
from .measurement import RunMeasurement


logger = get_logger(__name__)


class Publishing:
    """
    A part of the trainers, before TRL's in the order of classes; uploads are the Trainer's own.

    The trainer calls `_start_publishing` when TRL's constructor is done, and has `_tokens_trained`.
    """

    _command = ""  # of the command line
    _counted_tokens = ""  # what `_tokens_trained` counts, for people
    _steps_per_cycle = 1

    def _start_publishing(self) -> None:
        if self.is_world_process_zero():
            try:
                refuse_other_kinds(self.args.output_dir, self._kind)
            except ValueError as error:
                logger.warning(f"{error}, before the model is saved there")
        self._measurement = RunMeasurement(self, self._steps_per_cycle)
        self.add_callback(self._measurement)

    def _tokens_trained(self) -> int:
        raise NotImplementedError

    @property
    def _kind(self) -> str:
        return "adapter" if is_peft_model(self.accelerator.unwrap_model(self.model)) else "merged"

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As in the Trainer; before anything is trained, a folder or repository that has another kind is refused."""
        if not self.is_world_process_zero():
            return
        refuse_other_kinds(self.args.output_dir, self._kind)
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        token = token if token is not None else self.args.hub_token
        try:
            with self._private(private):
                super().init_hf_repo(token=token)
                refuse_public(self.hub_model_id, self.args.hub_private_repo, token)
            refuse_other_kinds_on_hub(self.hub_model_id, self._kind, token, self.args.hub_revision)
        except HfHubHTTPError as error:
            explain_refusal(error, name)
            raise
        warn_of_local_base(base_of(self.model), self.hub_model_id, self._kind == "adapter")
        if self.args.hub_token is not None and not isinstance(self.args, PatchArguments):
            logger.warning(
                "hub_token of a TRL config is written into training_args.bin, which is pushed too: log in with "
                "`hf auth login` instead, or pass a config of unsloth_trl, which leaves it out."
            )

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ):
        """As in the Trainer; raises `ValueError` if `output_dir` has a model of another kind than the trained one."""
        if self.is_world_process_zero():
            refuse_other_kinds(self.args.output_dir, self._kind)
        with self._private(private):
            return super().push_to_hub(commit_message, blocking=blocking, token=token, revision=revision, **kwargs)

    @contextlib.contextmanager
    def _private(self, private: bool | None) -> Iterator[None]:
        """`hub_private_repo` for one call: the Trainer of older transformers has no argument for it."""
        before = self.args.hub_private_repo
        if private is not None:
            self.args.hub_private_repo = private
        try:
            yield
        finally:
            self.args.hub_private_repo = before

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return
        folder = output_dir if output_dir is not None else self.args.output_dir
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        mend_base(folder, base_of(model))
        if is_peft_model(model):
            save_generation_config(model, folder)
            save_base_state(model, folder)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
    ):
        """As in TRL, with what this package knows of the run: data, config, patches, measured speed and memory."""
        if model_name is None:
            model_name = Path(self.args.hub_model_id or self.args.output_dir).name
        super().create_model_card(model_name=model_name, dataset_name=dataset_name, tags=tags)
        if not self.is_world_process_zero():
            return
        model = self.accelerator.unwrap_model(self.model)
        write_run_card(
            Path(self.args.output_dir) / "README.md",
            base_of(model),
            repo_id=self.hub_model_id,
            dataset_name=dataset_name,
            data=self._describe_data(),
            config=shown_config(self.args),
            command=self._command,
            adapters=describe_adapters(model),
            quantization=describe_quantization(model),
            patch_report=str(self.patch_report),
            measured=self._measurement.measured.lines(self._counted_tokens),
        )

    def _describe_data(self) -> list[str]:
        lines = []
        for name, dataset in (("train", self.train_dataset), ("eval", self.eval_dataset)):
            sets = dataset if isinstance(dataset, dict) else {"": dataset}
            for key, rows in sets.items():
                if rows is None:
                    continue
                label = f"{name} {key}".strip()
                size = f"{len(rows):,} rows" if isinstance(rows, Dataset) else "streamed"
                lines.append(f"{label}: {size}{self._about_rows(name)}")
        if self.state.global_step:
            lines.append(f"steps so far: {self.state.global_step:,}, epochs: {self.state.epoch or 0:.2f}")
        return lines

    def _about_rows(self, split: str) -> str:
        """What a row of the prepared dataset is."""
        args = self.args
        packed = getattr(args, "packing", False)
        if split == "eval" and getattr(args, "eval_packing", None) is not None:
            packed = args.eval_packing
        return f", packed up to {args.max_length} tokens ({args.packing_strategy})" if packed else ""
