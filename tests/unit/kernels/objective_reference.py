"""The formulas of every objective once more, one token at a time in Python floats, with their stop-gradient terms apart.

Written from the table in docs/staleness.md, not from the kernels. `frozen` is where the terms under `sg` and the masks are evaluated, so
that a numeric derivative in `ell` sees what a gradient may see.
"""

from __future__ import annotations

from math import exp, log

from anabranch.kernels.tokens import Tokens
from anabranch.schemas.config import CorrectionSection


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(x, high))


def reference_loss(
    of: Tokens, weights: list[float], config: CorrectionSection, ell: list[float], frozen: list[float]
) -> float:
    """−Σ weight·γ^lag·(J − penalty); `weights` of each rollout."""
    total, start = 0.0, 0
    for rollout, length in enumerate(of.lengths.tolist()):
        here = slice(start, start + length)
        start += length
        b, p, lags = (x[here].tolist() for x in (of.behaviour, of.proximal, of.lags))
        chosen = [True] * length if of.selected is None else of.selected[here].tolist()
        a = of.advantages[here].tolist()
        total += weights[rollout] * _rollout(config, ell[here], frozen[here], b, p, a, lags, chosen)
    return -total


def _rollout(
    c: CorrectionSection, ell: list[float], frozen: list[float], b: list[float], p: list[float], a: list[float], lags: list[int],
    chosen: list[bool],
) -> float:  # fmt: skip
    """Σ γ^lag·(J − penalty) over the tokens of one trajectory."""
    n = len(ell)
    d, d0 = [x - y for x, y in zip(ell, b, strict=True)], [x - y for x, y in zip(frozen, b, strict=True)]
    if any(not c.veto_low <= exp(x) <= c.veto_high for x in d0):
        return 0.0
    mean_lag = sum(lags) / n
    if c.penalty_kind == "k1":
        of_reward = [sum(d0) / n] * n if c.objective == "gspo" else d0
        a = [x - c.penalty * y for x, y in zip(a, of_reward, strict=True)]
    total = 0.0
    for t in range(n):
        lag = mean_lag if c.objective == "gspo" else lags[t]
        narrow = 1 / (1 + c.narrow_rate * max(0, lag - c.narrow_from)) if c.narrow_with_age else 1.0
        low, high, tau = 1 - c.clip_low * narrow, 1 + c.clip_high * narrow, c.tau * narrow
        adv, r, r0 = a[t], exp(d[t]), exp(d0[t])
        prob0, q = exp(frozen[t]), exp(b[t])
        match c.objective:
            case "none":
                j = adv * ell[t]
            case "ppo" | "grpo" | "dr_grpo":
                j = min(r * adv, clip(r, low, high) * adv)
            case "decoupled" | "a3po":
                anchor = p[t] if c.objective == "decoupled" else b[t] + (1 - 1 / max(lags[t], 1)) * d0[t]
                u = exp(ell[t] - anchor)
                j = min(exp(anchor - b[t]), c.ratio_cap) * min(u * adv, clip(u, low, high) * adv)
            case "tis":
                whole = sum(x - y for x, y in zip(p, b, strict=True))
                j = min(exp(p[t] - b[t] if c.ratio_level == "token" else whole), c.ratio_cap) * adv * ell[t]
            case "icepop":
                rho = exp(p[t] - b[t])
                j = rho * adv * ell[t] if c.band_low <= rho <= c.band_high else 0.0
            case "seq_mis":
                s = exp(sum(d0) / (n if c.sequence_ratio == "geometric" else 1))
                wider = 1 + c.band_widening * mean_lag
                j = min(r0, c.ratio_cap) * adv * ell[t] if c.band_low / wider <= s <= c.band_high * wider else 0.0
            case "cispo" | "aipo":
                j = min(r0, c.ratio_cap) * adv * ell[t]
            case "dppo_tv":
                keep = prob0 - q <= tau if adv > 0 else prob0 - q >= -tau
                j = min(r0, c.ratio_cap) * adv * ell[t] if keep else 0.0
            case "dppo_kl":
                kl = q * log(q / prob0) + (1 - q) * log((1 - q) / (1 - prob0))
                keep = kl <= tau or (prob0 <= q if adv > 0 else prob0 >= q)
                j = min(r0, c.ratio_cap) * adv * ell[t] if keep else 0.0
            case "gspo":
                s = exp(sum(d) / n)
                j = min(s * adv, clip(s, low, high) * adv)
            case "m2po":
                j = r * adv if chosen[t] else 0.0
            case "opsm":
                gone = sum(a) < 0 and -sum(d0) / n > c.opsm_delta
                j = 0.0 if gone else min(r * adv, clip(r, low, high) * adv)
            case "topr":
                ratio = r0 if c.ratio_level == "token" else exp(sum(d0))
                j = adv * ell[t] if adv > 0 else clip(ratio, 0, 1) * adv * ell[t]
        penalty = {"d2": d[t] ** 2, "k3": r - 1 - d[t], "k1": 0.0}[c.penalty_kind]
        total += c.age_weight ** lags[t] * (j - c.penalty * penalty)
    return total
