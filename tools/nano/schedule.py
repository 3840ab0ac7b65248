"""How the learning rate and the load-balance weight change over a run: pure functions of its progress."""

WARMUP_STEPS = 200
FINAL_LR_SHARE = 0.02

# Early on, a weak pull lets a few experts take every token; later it would keep experts from specialising.
BALANCE_WARMUP, BALANCE_MAIN, BALANCE_FINAL = 0.05, 0.02, 0.003


def progress(step: int, steps: int, seconds: float, budget_seconds: float) -> float:
    """The share of the run that is done, by whichever limit is nearer. 1 or more: stop."""
    return max(step / steps, seconds / budget_seconds)


def learning_rate_share(step: int, progress: float, decay_share: float) -> float:
    """Of the peak: a linear warm-up, constant, then linear in the last `decay_share` of the run."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    remaining = max(0.0, 1.0 - progress) / decay_share
    return warmup * max(FINAL_LR_SHARE, min(1.0, remaining))


def balance_weight(step: int, progress: float, decay_share: float) -> float:
    """High while routing forms, then constant, then decaying linearly over the same last part of the run."""
    if step < WARMUP_STEPS:
        return BALANCE_WARMUP
    remaining = min(1.0, max(0.0, 1.0 - progress) / decay_share)
    return BALANCE_FINAL + (BALANCE_MAIN - BALANCE_FINAL) * remaining
