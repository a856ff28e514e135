"""The built-in algorithms, one function each: a step as a list of model calls, whose edges follow from their keys.

A call reads and writes named values per sample; calls without an edge between them run at the same time. Algorithms
that consist of the same calls differ by the values of `config.Algorithm`. `config.ALGORITHM_DEFAULTS` has each
algorithm's own values; the docstrings here name them.

An algorithm in the user's own code is a `CustomAlgorithm` (`config/custom_algorithm.py`): it builds its graph from the
parts in this module, or takes the graph of its base. To add a built-in one, write a function that returns a `Graph`,
name it in `ALGORITHMS`, and add an interface that does not exist yet to the master (`graph/advantages.py`) or to the
trainer (`training/model_calls.py`).

Notation: π the policy, μ the policy that sampled, A the advantage, ρ = π/prox per token, r the reward of a sample. The
proximal policy prox is μ in a synchronous run. Where samples are older than the weights with which a step begins, it is
that policy (`algorithm.proximal`), and prox/μ, capped, is a weight in the loss: PPO's objective, decoupled from μ.
Hilton et al. 2021 (arXiv 2110.00641), Fu et al. 2025 (arXiv 2505.24298). This holds for all algorithms that sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kintsugi.config.custom_algorithm import FIELD, CustomAlgorithm, custom_algorithm
from kintsugi.config.schema import COMPARE_SAMPLES
from kintsugi.config.stages import Stage
from kintsugi.errors import ConfigError
from kintsugi.graph.advantages import CUSTOM_ADVANTAGES, MASTER_CALLS
from kintsugi.graph.dfg import Graph
from kintsugi.graph.mfc import Call, Key, Per
from kintsugi.types import Role

PROMPT = Key("prompt", "text")
COLUMNS = Key("columns", "text")
TOKENS = Key("tokens", "int32", ("tokens",))
LOSS_MASK = Key("loss_mask", "uint8", ("tokens",))
LOGPROBS = Key("logprobs", "float32", ("tokens",))
REFERENCE_LOGPROBS = Key("reference_logprobs", "float32", ("tokens",))
PROXIMAL_LOGPROBS = Key("proximal_logprobs", "float32", ("tokens",))
"""Log-probabilities under the policy with which the step begins."""
REFERENCE_KL = Key("reference_kl", "float32")
"""Estimated KL of the sample to the reference, summed over its tokens."""
REWARD = Key("reward", "float32")
SCORE = Key("score", "float32")
"""Score of the reward model."""
VALUES = Key("values", "float32", ("tokens",))
"""Value of the state before each token, and of the state after the last one."""
ADVANTAGE = Key("advantage", "float32")
"""Advantage of the sample, the same for all its tokens."""
TOKEN_ADVANTAGES = Key("token_advantages", "float32", ("tokens",))
RETURNS = Key("returns", "float32", ("tokens",))
UPDATE = Key("update", "float32", ("state",))
"""The new state of the model. Ranks report its digest, and the executor compares the digests."""
CRITIC_UPDATE = Key("critic_update", "float32", ("state",))

FORWARD, FORWARD_BACKWARD = 2, 6
"""Floating-point operations per parameter and token."""


def sft(stage: Stage) -> Graph:
    """Supervised fine-tuning: rows become tokens, the actor learns to write their completions.

    Minimises −log π(token) over completion tokens.
    """
    return graph(demonstrate(), train("sft_train"))


def reward_model(stage: Stage) -> Graph:
    """Pairwise reward model (Bradley–Terry): the preferred completion is to score higher.

    Minimises −log σ(score(chosen) − score(rejected)), a mean over pairs; the score is a linear head on the last token's
    hidden state. Ouyang et al. 2022 (arXiv 2203.02155).
    """
    return graph(demonstrate(), train("reward_train"))


def dpo(stage: Stage) -> Graph:
    """Direct preference optimisation: learns from pairs without sampling or a reward model.

    Minimises −log σ(β [log π/ref(chosen) − log π/ref(rejected)]), log-probabilities summed over the completion, a mean
    over pairs. Rafailov et al. 2023 (arXiv 2305.18290).
    """
    return graph(
        demonstrate(),
        inference("ref_inference", REFERENCE_LOGPROBS, interface="reference_inference"),
        train("dpo_train", REFERENCE_LOGPROBS),
    )


def ppo(stage: Stage) -> Graph:
    """Proximal policy optimisation with a critic: every token has its own advantage.

    A token's reward is −β·KL estimate and, at the last token, r besides. A = Σ (γλ)^k δ over the tokens that the policy
    chose, δ = reward + γ V(next state) − V(state); V after the last token is 0 for a true end and the critic's value
    for a completion that was cut off by length. A is whitened over the batch's unmasked tokens:
    (A − mean) / √(variance + 1e-8), variance with n − 1. Actor: −min(ρA, clip(ρ)A). Critic: ½ (V − return)², clipped
    around the value at sampling. Both train at the same time.
    Schulman et al. 2017 (arXiv 1707.06347); GAE: Schulman et al. 2015 (arXiv 1506.02438).
    """
    return graph(
        generate(),
        reward(),
        *reward_inference(stage),
        *reference_inference(stage),
        inference("critic_inference", VALUES),
        *proximal_inference(stage),
        token_advantage(stage, "gae"),
        policy_train(stage, TOKEN_ADVANTAGES),
        critic_train(),
    )


def grpo(stage: Stage) -> Graph:
    """Group relative policy optimisation: the group's mean reward is the baseline, there is no critic.

    A = (r − mean) / (std + 1e-4) over the group's valid samples, std with n − 1 in the denominator; the same A for
    every token of the sample; −min(ρA, clip(ρ)A), and β·KL to the reference added to the loss. Every token of the
    batch weighs the same; `denominator: sequences` is the paper's mean over each completion first.
    Shao et al. 2024 (arXiv 2402.03300).
    """
    return group_policy_gradient(stage, baseline="group_advantages")


def dr_grpo(stage: Stage) -> Graph:
    """GRPO done right: neither the deviation nor the length divides.

    A = r − mean (`scale_by_std: false`); token losses are divided by samples × `max_new_tokens`
    (`denominator: constant`). In expectation its gradient is the policy gradient times (n − 1)/n, since a sample is
    part of its own baseline, and times 1 / `max_new_tokens`. Liu et al. 2025 (arXiv 2503.20783).
    """
    return group_policy_gradient(stage, baseline="group_advantages")


def dapo(stage: Stage) -> Graph:
    """GRPO with clip-higher, dynamic sampling, token-level loss and overlong shaping.

    `clip_high` 0.28 over `clip_low` 0.2; groups whose rewards are all equal are replaced (`resampling_rounds`); every
    token of the batch weighs the same (`denominator: tokens`); the last `overlong_buffer` tokens before the limit cost
    reward linearly; no KL unless `beta` says so. Yu et al. 2025 (arXiv 2503.14476).
    """
    return group_policy_gradient(stage, baseline="group_advantages")


def gspo(stage: Stage) -> Graph:
    """GRPO with one ratio per sequence: the geometric mean of its tokens' ratios (`ratio: sequence_mean`).

    s = exp(mean over tokens of log π/prox); −min(sA, clip(s)A), a mean over sequences; the clip range is hundreds of
    times narrower than PPO's because a mean moves less than its parts. Zheng et al. 2025 (arXiv 2507.18071).
    """
    return group_policy_gradient(stage, baseline="group_advantages")


def rloo(stage: Stage) -> Graph:
    """REINFORCE leave-one-out: the baseline of a sample is the mean reward of the *other* samples of its group.

    A = r − mean of the others, not divided by a deviation; r has β·KL, summed over the sample, taken off; the whole
    completion is one action (`ratio: sequence`, the product of its tokens' ratios); −min(ρA, clip(ρ)A), a mean over
    sequences. In expectation its gradient is the policy gradient of E[r] − β KL itself: the factor is 1.
    Ahmadian et al. 2024 (arXiv 2402.14740).
    """
    return group_policy_gradient(stage, baseline="leave_one_out")


def reinforce_pp(stage: Stage) -> Graph:
    """REINFORCE++: PPO without a critic; the batch is the baseline.

    A = the discounted sum of the token rewards from here on (−β·KL estimate each, r at the last token), whitened over
    the batch's unmasked tokens as in PPO; −min(ρA, clip(ρ)A). Works with one sample per prompt. Without a critic there
    is nothing to bootstrap from: a completion cut off by length counts as ended, unless `mask_truncated` leaves it out.
    Hu et al. 2025 (arXiv 2501.03262).
    """
    return graph(
        generate(),
        reward(),
        *reward_inference(stage),
        *reference_inference(stage),
        *proximal_inference(stage),
        token_advantage(stage, "reward_to_go"),
        policy_train(stage, TOKEN_ADVANTAGES),
    )


def rollout(stage: Stage) -> Graph:
    """Sampling without learning: completions are scored and kept in the run folder, as data for later training."""
    return graph(generate(), reward(), train("store_rollouts", LOGPROBS, REWARD, name="store_rollouts"))


ALGORITHMS: Mapping[str, Callable[[Stage], Graph]] = {
    function.__name__: function
    for function in (sft, reward_model, dpo, ppo, grpo, dr_grpo, dapo, gspo, rloo, reinforce_pp, rollout)
}


MODEL_INTERFACES = frozenset(
    {"sft_train", "policy_train", "dpo_train", "reward_train", "critic_train", "store_rollouts"}
    | {"reference_inference", "proximal_inference", "critic_inference", "reward_inference"}
    | {"gae", "reward_to_go"}
)
"""Interfaces that the ranks can carry out; `training/model_calls.py` has the methods."""


def build_graph(stage: Stage) -> Graph:
    """The graph of one stage of the run."""
    custom = custom_algorithm(stage.algorithm)
    if custom is None:
        return ALGORITHMS[stage.algorithm.name](stage)
    return _custom_graph(stage, custom)


def _custom_graph(stage: Stage, custom: CustomAlgorithm) -> Graph:
    """The graph of a custom algorithm. ConfigError names what no process of a run could carry out."""
    name, base = stage.algorithm.name, ALGORITHMS[stage.algorithm.name](stage)
    if custom.base != name:
        raise _refusal(
            stage, f"a custom algorithm with the base {name}, as `algorithm.name` says", custom.base
        )
    if custom.graph is not None:
        built = _call_graph_function(stage, custom.graph)
    elif custom.group_advantages is None:
        built = base
    elif name in COMPARE_SAMPLES:
        built = group_policy_gradient(stage, baseline=CUSTOM_ADVANTAGES)
    else:
        usable = f"`group_advantages` with a base of {', '.join(sorted(COMPARE_SAMPLES))}, or with a `graph`"
        raise _refusal(stage, usable, f"the base {name}, whose advantages are per token")
    _check_custom_calls(stage, custom, built, base=base)
    return built


def _call_graph_function(stage: Stage, function: Callable[[Stage], Graph]) -> Graph:
    try:
        built: object = function(stage)
    except ConfigError as error:
        raise ConfigError(f"`{FIELD}` ({stage.algorithm.custom}): {error}") from error
    except Exception as error:
        raise _refusal(stage, "a Graph from `graph`", f"{type(error).__name__}: {error}") from error
    if not isinstance(built, Graph):
        raise _refusal(stage, "a Graph from `graph`", type(built).__name__)
    return built


def _check_custom_calls(stage: Stage, custom: CustomAlgorithm, built: Graph, *, base: Graph) -> None:
    """Refuse calls that no process of the run knows, and functions that no call uses."""
    known = {
        Role.MASTER: {*MASTER_CALLS}
        | ({CUSTOM_ADVANTAGES} if custom.group_advantages is not None else set()),
        Role.MODEL: _usable_interfaces(stage),
    }
    for call in built.calls.values():
        if call.per is Per.GROUP:
            if base.calls.get(call.name) != call:
                names = ", ".join(each.name for each in base.calls.values() if each.per is Per.GROUP)
                raise _refusal(
                    stage, f"the calls {names} of {custom.base}, unchanged, per group", f"{call.name!r}"
                )
        elif call.interface not in known.get(call.role, ()):
            choices = ", ".join(sorted(known.get(call.role, ())))
            raise _refusal(
                stage, f"call {call.name!r} to name an interface of {choices}", f"{call.interface!r}"
            )
    used = {call.interface for call in built.calls.values()}
    for field, interface in (("group_advantages", CUSTOM_ADVANTAGES), ("token_loss", "policy_train")):
        if getattr(custom, field) is not None and interface not in used:
            raise _refusal(
                stage, f"a call with the interface {interface!r}, because `{field}` is given", "none"
            )
    if "update" not in built.wanted:
        raise _refusal(stage, "a call that trains the actor (key `update`)", "none")


def _usable_interfaces(stage: Stage) -> set[str]:
    """Interfaces whose models a stage has."""
    missing = set() if stage.has_critic else {"critic_train", "critic_inference", "gae"}
    missing |= set() if stage.has_reference else {"reference_inference"}
    missing |= set() if stage.reward_model is not None else {"reward_inference"}
    return set(MODEL_INTERFACES) - missing


def _refusal(stage: Stage, expected: str, found: str) -> ConfigError:
    return ConfigError(f"`{FIELD}` ({stage.algorithm.custom}): expected {expected}, got {found}")


def group_policy_gradient(stage: Stage, *, baseline: str) -> Graph:
    """Graph of the critic-free algorithms: one advantage per sample, from the rewards of its group."""
    return graph(
        generate(),
        reward(),
        *reward_inference(stage),
        *reference_inference(stage, summed=stage.takes_kl_off_reward),
        *proximal_inference(stage),
        group_advantage(stage, baseline),
        policy_train(stage, ADVANTAGE),
    )


def demonstrate() -> Call:
    """A row as tokens: its completion for SFT; for pairs, sample 0 is the chosen and sample 1 the rejected one."""
    return Call("demonstrate", Role.ROLLOUT, Per.GROUP, "demonstrate", (PROMPT, COLUMNS), (TOKENS, LOSS_MASK))


def generate() -> Call:
    outputs = (TOKENS, LOSS_MASK, LOGPROBS)
    return Call(
        "actor_generate", Role.ROLLOUT, Per.GROUP, "generate", (PROMPT,), outputs, flops_per_token=FORWARD
    )


def reward() -> Call:
    return Call("reward", Role.ROLLOUT, Per.GROUP, "reward", (TOKENS, COLUMNS), (REWARD,))


def inference(name: str, *outputs: Key, interface: str = "") -> Call:
    """A forward pass of one of the model workers' models over the batch."""
    interface = interface or name
    inputs = (TOKENS, LOSS_MASK)
    return Call(name, Role.MODEL, Per.BATCH, interface, inputs, outputs, flops_per_token=FORWARD)


def reward_inference(stage: Stage) -> list[Call]:
    """Scores of the reward model, if the stage has one."""
    return [inference("reward_inference", SCORE)] if stage.reward_model else []


def reference_inference(stage: Stage, *, summed: bool = False) -> list[Call]:
    """Log-probabilities under the reference model, unless the weight of the KL is 0; also the KL `summed` over each
    sample where it is subtracted from the reward of the whole sample."""
    if not stage.has_reference:
        return []
    outputs = (REFERENCE_LOGPROBS, REFERENCE_KL) if summed else (REFERENCE_LOGPROBS,)
    return [inference("ref_inference", *outputs, interface="reference_inference")]


def proximal_inference(stage: Stage) -> list[Call]:
    """Log-probabilities under the policy with which the step begins, for stages with several updates that must stay
    close to it; a single update starts from that policy."""
    if not stage.asks_proximal:
        return []
    return [inference("prox_inference", PROXIMAL_LOGPROBS, interface="proximal_inference")]


def group_advantage(stage: Stage, interface: str) -> Call:
    """Advantage of each sample within its group; the master has all rewards and needs no model for it."""
    inputs = [REWARD]
    if stage.reward_model:
        inputs.append(SCORE)
    if stage.takes_kl_off_reward:
        inputs.append(REFERENCE_KL)
    return Call("advantage", Role.MASTER, Per.BATCH, interface, tuple(inputs), (ADVANTAGE,))


def token_advantage(stage: Stage, interface: str) -> Call:
    """Advantages per token, whitened over the batch; returns and values stay on the rank that trains the critic."""
    inputs, outputs = [LOGPROBS, REWARD], [TOKEN_ADVANTAGES]
    if stage.reward_model:
        inputs.append(SCORE)
    if stage.takes_kl_off_reward:
        inputs.append(REFERENCE_LOGPROBS)
    if interface == "gae":
        inputs.append(VALUES)
        outputs.append(RETURNS)
    return Call("token_advantage", Role.MODEL, Per.BATCH, interface, tuple(inputs), tuple(outputs))


def train(interface: str, *inputs: Key, name: str = "actor_train") -> Call:
    """The actor's update."""
    reads = (TOKENS, LOSS_MASK, *inputs)
    return Call(name, Role.MODEL, Per.BATCH, interface, reads, (UPDATE,), flops_per_token=FORWARD_BACKWARD)


def policy_train(stage: Stage, advantages: Key) -> Call:
    """The actor's update by policy gradient; with a reference model, the distance to it is at least reported."""
    reference = (REFERENCE_LOGPROBS,) if stage.has_reference else ()
    proximal = (PROXIMAL_LOGPROBS,) if stage.asks_proximal else ()
    return train("policy_train", LOGPROBS, advantages, *reference, *proximal)


def critic_train() -> Call:
    """The critic's update, at the same time as the actor's."""
    reads = (TOKENS, LOSS_MASK, VALUES, RETURNS)
    return Call(
        "critic_train",
        Role.MODEL,
        Per.BATCH,
        "critic_train",
        reads,
        (CRITIC_UPDATE,),
        flops_per_token=FORWARD_BACKWARD,
    )


def graph(*calls: Call) -> Graph:
    """A step of these calls: prompts and columns enter, updates leave."""
    updates = [key.name for call in calls for key in call.outputs if key in (UPDATE, CRITIC_UPDATE)]
    return Graph(calls, sources=(PROMPT, COLUMNS), wanted=updates)
