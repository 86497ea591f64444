"""The metrics of a training step, from those of its optimizer steps."""

from collections.abc import Mapping, Sequence

PER_STEP = ("loss", "grad_norm")


def step_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of token metrics over the tokens that carried weight, maxima, sums and last values, as each name needs.

    ``steps``: what `TrainEngine.train_batch` returned for an `Objective`, with ``tokens``, the number of trained tokens that
    the engine averaged over.
    """
    taken = [step for step in steps if not step["skipped"]] or list(steps)
    found = {name: sum(step[name] for step in taken) / len(taken) for name in PER_STEP}
    found |= {"lr": steps[-1]["lr"], "skipped": sum(step["skipped"] for step in steps)}
    kept = sum(step["tokens"] * step.get("kept", 0.0) for step in steps)
    own = set(found) | {"kept", "tokens"}
    for name in dict.fromkeys(name for step in steps for name in step if name not in own):
        if name.endswith("/max"):
            found[name] = max(step[name] for step in steps if name in step)
        elif kept:
            found[name] = sum(step["tokens"] * step[name] for step in steps if name in step) / kept
    return _derived(found)


def _derived(found: dict[str, float]) -> dict[str, float]:
    """Ratios of means; their parts are left out."""
    square = found.pop("correction/square", None)
    if square:
        found["correction/ess"] = found["correction/mean"] ** 2 / square
    fresh = found.pop("gap/fresh", 0.0)
    if fresh:
        found["gap/mean"] /= fresh
    else:
        found.pop("gap/mean", None)
        found.pop("gap/max", None)
    return found
