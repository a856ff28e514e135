"""Work that is due after a step. Pure functions of configuration and state."""

from __future__ import annotations

from kintsugi.config.schema import Config
from kintsugi.config.stages import Stage, next_stage, stages
from kintsugi.control.phases.table import Due
from kintsugi.control.state import MasterState


def carried_stage(config: Config, *, step: int) -> Stage:
    """Return the stage of the optimizer that a committed step carries; before the first step, the first stage."""
    every = stages(config)
    return next((stage for stage in every if step <= stage.last_step), every[-1])


def is_last(config: Config, *, step: int) -> bool:
    return step >= stages(config)[-1].last_step


def most_tokens(config: Config, *, num_eval_rows: int) -> int:
    """Return the most tokens that one step or one evaluation has."""
    samples = [stage.algorithm.batch_size * stage.algorithm.group_size for stage in stages(config)]
    samples.append(num_eval_rows * (1 + config.eval.num_samples))
    return max(samples) * config.generation.max_length


def evaluation_is_due(config: Config, state: MasterState) -> bool:
    """Return whether to evaluate now: before and after the main stage, and every `eval.every` steps of it; once per
    step."""
    main, step, every = stages(config)[-1], state.step, config.eval.every
    if any(done.step == step for done in state.evaluations):
        return False
    into = step - main.first_step + 1
    is_round = into % every == 0 if every > 0 else into == 0
    return step == main.last_step or (into >= 0 and is_round)


def steps_ahead(config: Config, state: MasterState) -> int:
    """Return how many steps rollout may run ahead of training now; at most the configured number."""
    most = config.asynchrony.max_staleness
    return most if state.pace is None else min(most, state.pace.ahead)


def needs_version(config: Config, state: MasterState, *, version: int, evaluates: bool) -> bool:
    """Return whether the run has to wait for newer weights at the servers than `version`: the next batch could not be
    sampled within the staleness bound, or this step is to be evaluated, or it is the last."""
    if version < 0 or version + steps_ahead(config, state) < state.step:
        return True
    due = evaluates and evaluation_is_due(config, state)
    return version < state.step and (due or is_last(config, step=state.step) or state.stop_reason is not None)


def save_is_due(config: Config, state: MasterState, *, stopping: bool, is_saving: bool) -> bool:
    """Return whether to save now: at the end, before a stop, and when a multiple of `checkpoint.every` has been passed
    since the last save. So a save that was lost with its rank, or was due while another was under way (`is_saving`), is
    made up for after a later step. A failed save is not repeated for the same step."""
    step, every = state.step, config.checkpoint.every
    if step == 0 or step in state.saved_steps or step == state.failed_save_step:
        return False
    if stopping or is_last(config, step=step):
        return True
    newest = max([0, state.failed_save_step, *state.saved_steps])
    return every > 0 and not is_saving and step // every > newest // every


def next_due(
    config: Config, state: MasterState, *, evaluates: bool, can_grow: bool, carried: str, is_saving: bool
) -> Due:
    """Decide what follows once the weights of a step are current. `carried`: stage that the ranks have started.
    `is_saving`: a save is under way."""
    stopping = state.stop_reason is not None
    if evaluates and evaluation_is_due(config, state):
        return Due.EVALUATION
    if save_is_due(config, state, stopping=stopping, is_saving=is_saving):
        return Due.SAVE
    if is_last(config, step=state.step):
        return Due.END
    if stopping:
        return Due.STOP
    if can_grow:
        return Due.GROWTH
    return Due.STAGE if carried != next_stage(config, step=state.step).name else Due.STEP
