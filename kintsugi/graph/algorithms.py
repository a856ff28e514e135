"""The algorithms, one function each: a step as the list of its model calls, whose edges follow from their keys.

A call reads and gives named values per sample; calls without an edge between them run at the same time. What one
algorithm does otherwise than another within the same calls is said by values of `config.Algorithm`, of which each has
its own (`config.ALGORITHM_DEFAULTS`); the docstrings here name them.

To add one, write a function that returns a `Graph`, name it in `ALGORITHMS`, and give whatever interface it names that
does not exist yet to the master (`graph/advantages.py`) or to the trainer (`training/interfaces.py`).

Notation: π the policy, μ the policy that sampled, A the advantage, ρ = π/prox per token, r the reward of a sample. The
proximal policy prox is μ in a synchronous run. Where samples are older than the weights with which a step begins, it is
that policy (`algorithm.proximal`), and prox/μ, capped, weighs the loss: PPO's objective decoupled from who sampled.
Hilton et al. 2021 (arXiv 2110.00641), Fu et al. 2025 (arXiv 2505.24298). This holds for all algorithms that sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kintsugi.graph.dfg import Graph
from kintsugi.graph.mfc import Call, Key, Per
from kintsugi.stages import Stage
from kintsugi.types import Role

PROMPT = Key("prompt", "text")
COLUMNS = Key("columns", "text")
TOKENS = Key("tokens", "int32", ("tokens",))
LOSS_MASK = Key("loss_mask", "uint8", ("tokens",))
LOGPROBS = Key("logprobs", "float32", ("tokens",))
REFERENCE_LOGPROBS = Key("reference_logprobs", "float32", ("tokens",))
PROXIMAL_LOGPROBS = Key("proximal_logprobs", "float32", ("tokens",))
"""Of the policy with which the step begins."""
REFERENCE_KL = Key("reference_kl", "float32")
"""The sample's estimated KL to the reference, summed over its tokens."""
REWARD = Key("reward", "float32")
SCORE = Key("score", "float32")
"""Of the reward model."""
VALUES = Key("values", "float32", ("tokens",))
"""Of the state before each token, and of the one after the last."""
ADVANTAGE = Key("advantage", "float32")
"""One for all tokens of the sample."""
TOKEN_ADVANTAGES = Key("token_advantages", "float32", ("tokens",))
RETURNS = Key("returns", "float32", ("tokens",))
UPDATE = Key("update", "float32", ("state",))
"""The new state itself; ranks vouch for it by its digest, which the executor compares."""
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
    """Proximal policy optimisation with a critic: every token has an advantage of its own.

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
    """No learning: completions are sampled, scored and kept in the run folder, to be trained on later."""
    return graph(generate(), reward(), train("store_rollouts", LOGPROBS, REWARD, name="store_rollouts"))


ALGORITHMS: Mapping[str, Callable[[Stage], Graph]] = {
    function.__name__: function
    for function in (sft, reward_model, dpo, ppo, grpo, dr_grpo, dapo, gspo, rloo, reinforce_pp, rollout)
}


def build_graph(stage: Stage) -> Graph:
    """The graph of one stage of the run."""
    return ALGORITHMS[stage.algorithm.name](stage)


def group_policy_gradient(stage: Stage, *, baseline: str) -> Graph:
    """What the critic-free algorithms of groups share: one advantage per sample, from its group's rewards."""
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
    """The reward model's score, where there is one."""
    return [inference("reward_inference", SCORE)] if stage.reward_model else []


def reference_inference(stage: Stage, *, summed: bool = False) -> list[Call]:
    """The reference's log-probabilities, where the KL weighs something; also the KL `summed` over each sample where it
    is taken off the reward of the whole sample."""
    if not stage.has_reference:
        return []
    outputs = (REFERENCE_LOGPROBS, REFERENCE_KL) if summed else (REFERENCE_LOGPROBS,)
    return [inference("ref_inference", *outputs, interface="reference_inference")]


def proximal_inference(stage: Stage) -> list[Call]:
    """The log-probabilities of the policy with which the step begins, where updates are to stay close to it and there
    are several; a single one starts from them."""
    if not stage.asks_proximal:
        return []
    return [inference("prox_inference", PROXIMAL_LOGPROBS, interface="proximal_inference")]


def group_advantage(stage: Stage, interface: str) -> Call:
    """Each sample against its group; the master has all rewards and needs no model for it."""
    inputs = [REWARD]
    if stage.reward_model:
        inputs.append(SCORE)
    if stage.takes_kl_off_reward:
        inputs.append(REFERENCE_KL)
    return Call("advantage", Role.MASTER, Per.BATCH, interface, tuple(inputs), (ADVANTAGE,))


def token_advantage(stage: Stage, interface: str) -> Call:
    """Advantages per token, whitened over the batch; returns and values stay where the critic learns from them."""
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
    """The actor's update by policy gradient; where there is a reference, the distance to it is at least reported."""
    reference = (REFERENCE_LOGPROBS,) if stage.has_reference else ()
    proximal = (PROXIMAL_LOGPROBS,) if stage.asks_proximal else ()
    return train("policy_train", LOGPROBS, advantages, *reference, *proximal)


def critic_train() -> Call:
    """The critic's update, beside the actor's."""
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
