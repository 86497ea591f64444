"""Every metric: its unit, what it is, and what to do when it looks wrong. docs/metrics.md is made from this table.

A name may hold one part in angle brackets, which stands for any text: ``episodes/dropped/<reason>``.
"""

import re

from tandem.tracking.metrics import roles, rollout, trainers
from tandem.tracking.metrics.metric import Metric, Section

SECTIONS: dict[str, Section] = {
    "Reward": rollout.REWARD,
    "Optimization": roles.OPTIMIZATION,
    "Critic": roles.CRITIC,
    "Groups": rollout.GROUPS,
    "Preferences": roles.PREFERENCES,
    "Completions": rollout.COMPLETIONS,
    "Staleness and the gap": rollout.STALENESS,
    "Time": trainers.TIME,
    "Episodes and resources": trainers.EPISODES,
    "Fleet": rollout.FLEET,
    "Evaluation": trainers.EVALUATION,
}

METRICS: dict[str, Metric] = {name: metric for section in SECTIONS.values() for name, metric in section.items()}


def explain(name: str) -> Metric | None:
    """The row for a metric's name; None where the table has none (a workflow's own metrics, for example)."""
    if name in METRICS:
        return METRICS[name]
    for pattern, metric in METRICS.items():
        literal = re.sub(r"\\?<\w+\\?>", ".+", re.escape(pattern))
        if "<" in pattern and re.fullmatch(literal, name):
            return metric
    return None


def markdown() -> str:
    lines = [
        "# Metrics",
        "",
        "<!-- Made by `python -m tandem.tracking.catalog`; edit src/tandem/tracking/metrics/ instead. -->",
        "",
        "Each step is one line of `metrics.jsonl`, with `step`, `time` (seconds since 1970) and the values below;",
        "one that is not finite is `null`.",
        "`reward.png` and `curves.png` show most of them, and the line on the terminal the most important ones.",
        "Metrics that do not apply (staleness of a run of SFT, for example) are absent. A workflow's own metrics",
        "appear under its own names.",
    ]
    for section, metrics in SECTIONS.items():
        lines += ["", f"## {section}", "", "| name | unit | what it is | when it looks wrong |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {metric.unit} | {metric.meaning} | {metric.advice} |" for name, metric in metrics.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
