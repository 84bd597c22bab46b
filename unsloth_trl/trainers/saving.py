"""What both trainers do for checkpoints: a save that fails or is killed never costs the last good one."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints

from ..hub.checkpoints import existing_part
from ..messages import first_line
from .checkpoint_files import find_damage, find_missing, find_missing_state
from .checkpoint_folders import (
    ASIDE,
    clear_aside,
    is_complete,
    last_complete,
    list_checkpoints,
    put_in_place,
    set_incomplete_aside,
)
from .construction import setting
from .interrupts import SaveOnInterrupt
from .resuming import Resuming


logger = get_logger(__name__)


class Saving(Resuming):
    """
    A part of the trainers, before TRL's in the order of classes; what a checkpoint has is TRL's and the Trainer's.

    A checkpoint is written to `output_dir/_incomplete`, and renamed to `checkpoint-N` when all processes are done and
    its files are on the disk. Only then is it pushed, and older ones are deleted.

    The trainer calls `_start_saving` when TRL's constructor is done.
    """

    _aside = False  # whether a checkpoint is being written
    _push_is_due = False

    def _start_saving(self) -> None:
        self._start_resuming()
        self._interrupt = SaveOnInterrupt(self.accelerator) if setting(self.args, "save_on_interrupt") else None
        if self._interrupt is not None:
            self.add_callback(self._interrupt)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """
        As in the Trainer. `resume_from_checkpoint=True` takes the last checkpoint that is complete: with weights,
        optimizer, schedule and random state, none of them cut off (`save_only_model=True`: with weights).

        Raises:
            ValueError: If the checkpoint to resume from is not complete, or none in `output_dir` is.
            KeyboardInterrupt: With `save_on_interrupt=True`, after Ctrl-C and the checkpoint that follows it.
        """
        self._clear(Path(self.args.output_dir))
        self._resumed_from = self._choose_checkpoint(resume_from_checkpoint)
        if self._interrupt is None:
            return super().train(self._resumed_from, *args, **kwargs)
        with self._interrupt.watching():
            result = super().train(self._resumed_from, *args, **kwargs)
        self._interrupt.stop(self._where_it_is_saved())
        return result

    def _clear(self, folder: Path) -> None:
        if self.is_local_process_zero():
            for name in clear_aside(folder):
                logger.warning(f"The save of {folder / name} was interrupted: what there was of it is removed.")
        self.accelerator.wait_for_everyone()

    def _choose_checkpoint(self, asked: str | os.PathLike | bool | None) -> str | None:
        """The checkpoint to resume from; incomplete ones, which other programs leave, are renamed."""
        if asked is None or asked is False:
            return None
        folder = Path(self.args.output_dir)
        found = {path: self._why_not(path) for path in reversed(list_checkpoints(folder))}
        last = next((path for path, reason in found.items() if reason is None), None)
        if asked is not True:
            asked = Path(asked)
            reason = self._why_not(asked) if asked.is_dir() else "is no folder"
            if reason is not None:
                instead = f"; resume_from_checkpoint=True takes {last}" if last is not None else ""
                raise ValueError(f"resume_from_checkpoint={str(asked)!r} {reason}{instead}")
        elif last is None:
            reasons = "; ".join(f"{path.name} {reason}" for path, reason in found.items())
            raise ValueError(
                f"resume_from_checkpoint=True needs a checkpoint in output_dir={self.args.output_dir!r}, which has "
                f"{f'only incomplete ones ({reasons})' if found else 'none'}; pass the folder of a checkpoint, or "
                "None to begin anew"
            )
        chosen = last if asked is True else asked
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            for path, damage in set_incomplete_aside(folder):
                logger.warning(f"A checkpoint in {folder} {damage}: it is now {path.name}, and not used.")
        self.accelerator.wait_for_everyone()
        for path, reason in found.items():  # the highest step first
            if asked is not True or path == chosen:
                break
            if path.is_dir():
                logger.warning(f"{path} {reason}. It is left out: the run goes on from {chosen}.")
        if missing := find_missing_state(chosen):
            logger.warning(
                f"{chosen} has no {' and no '.join(missing)}: what these would have begins anew, as "
                "save_only_model=True is set. Save with save_only_model=False to go on as if nothing had happened."
            )
        return str(chosen)

    def _why_not(self, checkpoint: Path) -> str | None:
        """Why a run cannot go on from this folder, as the rest of a sentence about it, or `None`."""
        if (damage := find_damage(checkpoint)) is not None:
            return f"{damage}: its save was interrupted, or it is not a checkpoint"
        missing = find_missing(checkpoint)
        state = find_missing_state(checkpoint)
        if not missing or missing == state and self.args.save_only_model:
            return None
        text = f"has no {' and no '.join(missing)}, without which a run cannot go on as it was"
        if missing == state:
            text += " (if it was saved with save_only_model=True, set that again to go on from its weights alone)"
        return text

    def _get_output_dir(self, trial) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, ASIDE) if self._aside else folder

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial))
        written = folder / ASIDE / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._clear(folder)
        self._aside, self._push_is_due = True, False
        try:
            super()._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                self._save_progress(written)
            self._name_best(folder, written)
            self.accelerator.wait_for_everyone()
            # one for all processes, or one for each machine where their disks are not shared
            if self.is_world_process_zero():
                put_in_place(written, folder)
            self.accelerator.wait_for_everyone()
            if self.is_local_process_zero() and written.is_dir():
                put_in_place(written, folder)
        except BaseException as error:
            self._give_up(error, folder, written.name)
            raise
        finally:
            self._aside = False
        self._clear(folder)
        if self._push_is_due:
            self._push_from_checkpoint(str(folder / written.name))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(folder),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in the Trainer; an error of the disk says that the model is still there to be saved elsewhere."""
        try:
            super().save_model(output_dir, _internal_call)
        except Exception as error:
            if self._aside or not _is_of_the_disk(error):
                raise
            folder = Path(output_dir if output_dir is not None else self.args.output_dir)
            last = last_complete(Path(self.args.output_dir))
            kept = f"; {last} is the last good checkpoint" if last is not None else ""
            raise OSError(
                f"the model could not be saved in {folder}: {_reason(error, folder)}{kept}. It is still in memory: "
                "make room, or name a folder on another disk, and call save_model again."
            ) from error

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._aside:
            self._push_is_due = True
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    def _name_best(self, folder: Path, written: Path) -> None:
        """What the Trainer makes of `best_global_step`, for the place where the checkpoint is going to be."""
        if not self.state.best_global_step or self.args.save_strategy == SaveStrategy.NO:
            return
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        before = self.state.best_model_checkpoint
        if name == written.name or (folder / name).exists():
            self.state.best_model_checkpoint = str(folder / name)
        if self.args.should_save and self.state.best_model_checkpoint != before:
            self.state.save_to_json(str(written / TRAINER_STATE_NAME))

    def _give_up(self, error: BaseException, folder: Path, name: str) -> None:
        """Remove what was written, which makes room; an error of the disk says what is left and what to do."""
        if self.is_local_process_zero():
            clear_aside(folder)
        if not _is_of_the_disk(error):
            return
        last = last_complete(folder)
        kept = f"{last} is the last good one" if last is not None else "there is no earlier one"
        again = " and resume with resume_from_checkpoint=True" if last is not None else ""
        raise OSError(
            f"{folder / name} could not be saved: {_reason(error, folder)}; {kept}. Make room{again}; a lower "
            "save_total_limit, or save_only_model=True, needs less."
        ) from error

    def _where_it_is_saved(self) -> str | None:
        checkpoint = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        return str(checkpoint) if is_complete(checkpoint) else None


def _reason(error: Exception, folder: Path) -> str:
    free = shutil.disk_usage(existing_part(folder)).free / 2**30
    return f"{first_line(error)} ({free:.1f} GiB are free there now)"


def _is_of_the_disk(error: BaseException) -> bool:
    """Whether a write failed for what the disk is or has; errors such as a missing permission say enough."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    if isinstance(error, SafetensorError):
        return True
    # torch.save has no error of its own for what its writer meets
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("PytorchStreamWriter", "inline_container", "iostream error")
    )
