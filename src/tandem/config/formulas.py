"""The formula of every named part of an algorithm, as text, and the paper it comes from.

`tandem algorithms NAME` and docs/algorithms/ put the formulas of a preset together from these; a test says that every choice
of `config/knobs.py` has one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

NOTATION = """r_i: reward of sample i; T_i: its trained tokens; g: its group, its prompt's samples; N: samples in the loss.
ρ = exp(policy − proximal), w = exp(proximal − rollout), d = policy − reference, from log-probabilities by: `rollout` the
inference engine, `proximal` the trainer just before this update, `policy` the weights being optimised, `reference` the
frozen model. sg: without gradient. Log-ratios are clamped to ±20."""


@dataclass(frozen=True)
class Formula:
    """One part of an algorithm in a line or two."""

    text: str
    """Plain text, in the notation of `NOTATION`."""

    sources: tuple[str, ...] = ()
    """arXiv numbers."""


def _f(text: str, *sources: str) -> Formula:
    return Formula(text, sources)


FORMULAS: Mapping[str, Mapping[str, Formula]] = {
    "advantage": {
        "gae": _f(
            "δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γλ·A_{t+1},  R_t = A_t + V_t; over trained tokens only. After "
            "the last token "
            "V is 0 if the answer ended by itself, the critic's value if it was cut. A is then whitened over the "
            "tokens of the batch",
            "1506.02438",
        ),
        "grpo": _f(
            "A_i = (r_i − mean_g r) / (std_g r + 1e-6), std unbiased; 0 where all rewards of g are equal", "2402.03300"
        ),
        "dr_grpo": _f("A_i = r_i − mean_g r", "2503.20783"),
        "rloo": _f("A_i = r_i − mean of r over the other samples of g", "2402.14740"),
        "lite_ppo": _f("A_i = (r_i − mean_g r) / std of r over the batch; 0 where all of them are equal", "2508.08221"),
        "reinforce_pp": _f(
            "A_t = x_t whitened over the tokens of the batch, (x − μ)/√(σ² + 1e-8), x_t the return-to-go of the "
            "tokens' rewards, γ = 1",
            "2501.03262",
        ),
        "reinforce_pp_baseline": _f(
            "A_i = x_i whitened over the samples of the batch, x_i = r_i − mean_g r; groups without spread stay 0",
            "2501.03262",
        ),
        "remax": _f("A_i = r_i − r(greedy answer to the same prompt)", "2310.10505"),
        "opo": _f("A_i = r_i − Σ_g T_j·r_j / Σ_g T_j", "2505.23585"),
        "max_rl": _f("A_i = (r_i − mean_g r) / mean_g r; 0 where the mean is not positive", "2602.02710"),
        "gdpo": _f(
            "A_i = Σ_k weight_k·(r_ik − mean_g r_k)/(std_g r_k + 1e-6), whitened over the samples of the batch; "
            "k: the named rewards",
            "2601.05242",
        ),
        "cpgd": _f(
            "A_i = ω·(r_i − mean_g r); ω = 1/(std_g r + 1e-6), or min(groups / groups with spread, 3), or 1, as "
            "`weighting` says",
            "2505.12504",
        ),
        "reinforce": _f("A_t = sum of the rewards of token t and later ones; the sample's stands on its last trained token"),
    },
    "policy_loss": {
        "ppo_clip": _f(
            "L_t = −min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high)·A); with dual_clip = c > 1, where A < 0, at most c·|A|; "
            "with two_sided = δ, min(ρ, δ) on the unclipped branch",
            "1707.06347",
            "2503.14476",
            "1912.09729",
            "2505.07291",
        ),
        "gspo": _f(
            "L_t = −min(s_i·A, clip(s_i, 1 − clip_low, 1 + clip_high)·A), s_i = exp(mean of log ρ over the sequence)",
            "2507.18071",
        ),
        "gspo_token": _f(
            "as gspo, with sg[s_i]·exp(policy − sg[policy]) for s_i, so that A may differ by token", "2507.18071"
        ),
        "luspo": _f("L_t = T_i × the loss of gspo", "2602.05261"),
        "gmpo": _f(
            "L_i = −A·exp(mean_t c_t), c_t = min(log ρ_t, +clip) where A > 0, max(log ρ_t, −clip) where A < 0", "2507.20673"
        ),
        "cispo": _f("L_t = −sg[clip(ρ, 1 − clip_low, 1 + clip_high)]·A·policy", "2506.13585"),
        "sapo": _f(
            "L_t = −(4/τ)·σ(τ(ρ − 1))·A, τ = tau_positive where A > 0, else tau_negative; the gradient at ρ = 1 is −A",
            "2511.20347",
        ),
        "m2po": _f(
            "L_t = −M_t·exp(policy − rollout)·A. Candidates: A > 0 and proximal > rollout, or A < 0 and proximal < "
            "rollout; M "
            "drops those of the largest (proximal − rollout)² until its mean over the remaining ones is at most the "
            "threshold",
            "2510.01161",
        ),
        "cpgd": _f(
            "L_t = −A·min(policy, proximal + ln(1 + clip)) where A > 0, −A·max(policy, proximal + ln(1 − clip)) where "
            "A < 0; plus drift·sg[min(ρ − 1, drift_cap)]·policy",
            "2505.12504",
        ),
        "dppo": _f(
            "L_t = −A·sg[min(ρ, 20)]·policy·M_t; with p = exp(policy), q = exp(rollout), M drops tokens that A pushes "
            "further away from q where |p − q| (tv) or the binary KL(q ‖ p) (kl) exceeds the threshold already",
            "2602.04879",
        ),
        "vespo": _f(
            "L_t = −sg[φ]·A·policy, φ = e^λ·W^k·e^(−λW), W = Π exp(policy − rollout) over the sequence; (k, λ) by the "
            "sign of A",
            "2602.10693",
        ),
        "reinforce": _f("L_t = −A·policy; from the second optimizer step of a batch on × sg[min(ρ, 2)]"),
        "clip_cov": _f(
            "as ppo_clip, with loss 0 for a random part `share` of the tokens that are not clipped and have a covariance "
            "(A − mean A)·(proximal − mean proximal) in (low, high)",
            "2505.22617",
        ),
        "kl_cov": _f("L_t = −ρA, plus coefficient·|log ρ| at the part `share` of largest such covariance", "2505.22617"),
    },
    "aggregation": {
        "token_mean": _f("Σ over tokens of L_t / ΣT: every token counts the same", "2503.14476"),
        "sequence_mean": _f("Σ L_t / (N·T_i): every sample counts the same", "2402.03300"),
        "sequence_sum": _f("Σ L_t / N"),
        "constant": _f("Σ L_t / (N·max_tokens), max_tokens the longest answer allowed", "2503.20783"),
    },
    "shaping": {
        "scale": _f("r ← factor·r"),
        "bias": _f("r ← r + offset"),
        "clip": _f("r ← r within [low, high]"),
        "overlong": _f(
            "r ← r + 0 up to max_tokens − buffer_tokens, then falling in a line to −1 at max_tokens and beyond", "2503.14476"
        ),
        "mask_truncated": _f("answers cut by their length get weight 0"),
        "penalize_truncated": _f("r ← r − penalty for answers cut by their length"),
    },
    "filter": {
        "none": _f("all groups are trained on"),
        "dynamic_sampling": _f("groups with 0 < correct < all; more are drawn until the batch is full", "2503.14476"),
        "accuracy_band": _f("groups with mean accuracy in [low, high]"),
    },
    "token_filter": {
        "none": _f("all trained tokens count"),
        "top_entropy": _f(
            "the part `share` of the batch's tokens with the largest entropy, by the pass before the update; the "
            "others get weight 0 and stay in the denominators",
            "2506.01939",
        ),
    },
    "correction.reject": {
        "none": _f("all trajectories are kept"),
        "product": _f("trajectories whose product of w lies in [low, high]"),
        "geometric": _f("trajectories whose geometric mean of w lies in [low, high]"),
        "negative_drift": _f(
            "all but those with A < 0 whose mean of (rollout − policy) is above the threshold", "2512.02556"
        ),
    },
}
"""Field of `AlgorithmConfig` → choice → formula."""

CORRECTIONS: Mapping[str, Formula] = {
    "none": _f("tokens of older weights count as if they were new"),
    "truncate": _f("L_t × min(w, high)"),
    "mask": _f("L_t × w where low ≤ w ≤ high, × 0 elsewhere", "2505.24298", "2510.18855"),
}
"""`algorithm.correction.weight` → formula."""

KL_FORMS: Mapping[str, Formula] = {
    "k1": _f("d"),
    "k2": _f("d²/2"),
    "k3": _f("exp(−d) − 1 + d"),
    "k3_plus": _f("value of k3, gradient of k2"),
}
"""`algorithm.kl.estimator` → formula."""
