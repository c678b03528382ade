"""What a start finds in the run folder: the last checkpoint, the one before it, a model, or nothing; and what it makes
of each. Damaged files are set aside under other names, never removed, and a best model that is missing is made again.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from speakernet.checkpoint import CheckpointError
from speakernet.parallel import distributed
from speakernet.training.continuity import check_speakers, misfit, say_changes
from speakernet.training.keeping import Keeper
from speakernet.training.options import TrainerOptions
from speakernet.training.state import TrainingState
from speakernet.training.store import Found

logger = logging.getLogger(__name__)


def resume(keeper: Keeper, options: TrainerOptions) -> bool:
    """Take a run up from what its folder holds; returns whether there was anything. Call it with the folder held.

    Where best.pt is gone and cannot be made again, `state.best_eer_percent` is infinite afterwards.

    Raises:
        CheckpointError: the checkpoint cannot be read for another reason than damage, or is of another model or head.
    """
    store, state = keeper.store, keeper.state
    found = distributed.from_main(store.find)
    if found is None:
        return False
    if found.is_model:
        _begin_with_model(keeper, found, options)
    elif found.path:
        _go_on(keeper, found, options)
    # Only now: a start that was refused has changed nothing.
    asides = distributed.from_main(lambda: store.heal(found))
    if asides:
        logger.warning("%s; %s", "; ".join(asides), _says_what_goes_on(found))
    if found.path is None:
        return False
    _take_up_best(keeper)
    if found.is_model:
        keeper.save_last()
    # Fewer epochs may be asked for now than are done.
    wanted = max(options.max_epochs, state.epoch)
    logger.info("resumed from %s: %d of %d epochs, step %d", found.path, state.epoch, wanted, state.step)
    return True


def _go_on(keeper: Keeper, found: Found, options: TrainerOptions) -> None:
    """Take every part's state from the contents of last.pt.

    Raises:
        CheckpointError: the weights are of another model or another number of speakers.
    """
    state = keeper.state
    check_speakers(found.contents.get("training", {}), keeper.origin, found.path)
    saved = keeper.restore(found.contents, found.path)
    say_changes(saved, keeper.origin, found.path)
    if options.patience == 0 or state.evaluations_without_gain < options.patience:
        state.stopped_early = False
    # More epochs than then: there will be other checkpoints to average.
    state.averaged = state.averaged and state.epochs_done(options)
    if state.batch:
        keeper.loader.set_epoch(state.epoch)
        try:
            keeper.loader.load_state_dict(saved["loader"])
        except ValueError as error:
            logger.warning("epoch %d begins anew: %s", state.epoch + 1, error)
            state.batch = 0


def _begin_with_model(keeper: Keeper, found: Found, options: TrainerOptions) -> None:
    """Weights and place of a model file; optimizer and head, which it does not hold, stay as they were built.

    Raises:
        CheckpointError: the weights are of another model.
    """
    state, summary = keeper.state, found.contents["training_summary"]
    try:
        # What is no weight of a model file (the position in keyed draws) stays as it is.
        keeper.net.load_state_dict({**keeper.net.state_dict(), **found.contents["weights"]})
    except RuntimeError as error:
        why = misfit({"net": found.contents["weights"]}, {}, {"net": keeper.net}, error)
        raise CheckpointError(f"{found.path} is of another model: {why}. Choose another --save_path") from error
    keeper.average.load_state_dict({"steps": 0, "kept": []})
    # A later stage begins where the epochs of this one are done.
    is_own = summary.get("stage", "") == keeper.stage.name
    state.epoch = state.evaluated_epoch = int(summary["epoch"]) if is_own else options.max_epochs
    state.step = int(summary["step"])
    state.best_eer_percent, state.best_epoch = float(summary["best_eer_percent"]), state.epoch


def _says_what_goes_on(found: Found) -> str:
    if found.path is None:
        return "no other checkpoint of this run can be read, so it begins anew"
    if found.is_model:
        return (
            f"the run goes on with the weights of {found.path.name} after epoch "
            f"{found.contents['training_summary']['epoch']}, with a fresh optimizer and a new head of the loss"
        )
    return f"the run goes on from {found.path.name}"


def _take_up_best(keeper: Keeper) -> None:
    """Let best.pt be the model to beat; made again where it is missing or damaged and its epoch was kept."""
    store, state = keeper.store, keeper.state
    best = distributed.from_main(store.load_best)
    if best is not None and not _is_behind(best["training_summary"], state, keeper.stage.name):
        state.take_up_best(best["training_summary"], keeper.stage.name)
        return
    if math.isinf(state.best_eer_percent):
        # Nothing was evaluated yet.
        return
    kept = distributed.from_main(lambda: store.restore_best(state.best_epoch, state.best_eer_percent))
    found = "missing" if best is None else "older than last.pt"
    if kept is not None:
        logger.warning("best.pt was %s: made again from %s", found, kept.name)
        return
    if best is not None:
        # A worse model that is there is more than a better one that is not.
        summary = best["training_summary"]
        state.best_eer_percent, state.best_epoch = float(summary["best_eer_percent"]), int(summary["epoch"])
        logger.warning("best.pt is of epoch %d: the better one was never written", state.best_epoch)
        return
    logger.warning("best.pt, of epoch %d, was missing and is not in checkpoints/: it begins anew", state.best_epoch)
    state.best_eer_percent, state.evaluations_without_gain, state.best_stage = math.inf, 0, ""


def _is_behind(summary: Mapping[str, Any], state: TrainingState, stage: str) -> bool:
    """Whether best.pt is not the best model that this stage knows of: the disk was full when that one was written."""
    is_own = summary.get("stage", "") == stage == state.best_stage
    return is_own and summary["best_eer_percent"] > state.best_eer_percent
