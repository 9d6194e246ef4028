"""AdaServe's Fig. 5: two requests' draft trees, cut to what each needs, of a budget of 8 nodes.

Each has a root, its last token, and of each layer two candidates. r0 needs 0.6 tokens beyond its root and takes one
node, r1 needs 0.8 and takes two; the three nodes that are left go to the likeliest candidates of both. The paper prints
the probabilities of the first three nodes; the others are ours, in the order that its text gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import Found
from experiments._exhaustive_selection import optimal
from rubato.core.plan import Tree
from rubato.measure.confidence import Estimate
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.policy_kit.draft_tree import select

SOURCE = "AdaServe, Fig. 5"
SECONDS = 0.1

TREES = (
    Tree((-1, -1, 0, 0, 2, 2), (0.7, 0.2, 0.42, 0.21, 0.336, 0.05)),
    Tree((-1, -1, 0, 1, 2, 3), (0.5, 0.4, 0.35, 0.2, 0.1, 0.1)),
)
NEEDED = (1.6, 1.8)  # tokens, the root's one among them
BUDGET = 8
CUT, REST, DROPPED = "what its TPOT needs", "the likeliest of all", "not verified"


def jobs(small: bool) -> list[Job]:
    return [Job("toy", chosen, ())]


def chosen() -> dict[str, Any]:
    """Of each request, the nodes taken for its SLO, all that are verified, and those of Algorithm 1."""
    deepest = 1 << 30  # n_max does not bind
    needs = (b for b in range(len(TREES), BUDGET) if optimal(TREES, NEEDED, b) is not None)
    nodes = next(needs)  # the least budget that gives both what they need: all of it is for the SLOs
    return {
        "slo": [list(own) for own in select(TREES, NEEDED, nodes, deepest)],
        "all": [list(own) for own in select(TREES, NEEDED, BUDGET, deepest)],
        "optimal": [list(own) for own in optimal(TREES, NEEDED, BUDGET) or ()],
    }


def found(values: Sequence[Any], small: bool) -> Found:
    [value] = values
    slo, all_ = value["slo"], value["all"]
    numbers = {
        "slo-nodes-r0": len(slo[0]),
        "slo-nodes-r1": len(slo[1]),
        "slo-tokens-r0": sum(TREES[0].paths[node] for node in slo[0]),
        "slo-tokens-r1": sum(TREES[1].paths[node] for node in slo[1]),
        "left": BUDGET - len(TREES) - sum(map(len, slo)),
        "rest-r0": len(all_[0]) - len(slo[0]),
        "rest-r1": len(all_[1]) - len(slo[1]),
        "as-algorithm-1": all_ == value["optimal"],
    }
    return Found({name: Estimate.exact(float(n)) for name, n in numbers.items()}, value, [], "none", {"budget": BUDGET})


def tables(data: Any) -> str:
    rows = [["request", "needs", "taken for its SLO (path probability)", "taken as the likeliest"]]
    for at, tree in enumerate(TREES):
        slo = data["slo"][at]
        said = [
            ", ".join(f"t{node + 1} ({tree.paths[node]:g})" for node in nodes)
            for nodes in (slo, [node for node in data["all"][at] if node not in slo])
        ]
        rows.append([f"r{at}", f"{NEEDED[at] - 1:g} beyond its root", *said])
    return markdown(rows)


def draw(data: Any, axes: Any) -> None:
    """Both trees, a node's path probability in it."""
    colours = {CUT: "#d95f02", REST: "#1b9e77", DROPPED: "#dddddd"}
    for at, tree in enumerate(TREES):
        places = {-1: (4.0 * at, 0.0)}
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
            side = tree.depths[:node].count(depth)
            places[node] = (4.0 * at - 0.8 + 1.6 * side, -float(depth))
            axes.plot(*zip(places[parent], places[node], strict=True), color="#888888", zorder=1)
        slo, all_ = data["slo"][at], data["all"][at]
        for node, (x, y) in places.items():
            why = CUT if node in slo else REST if node in all_ else DROPPED
            colour = "#7570b3" if node < 0 else colours[why]
            axes.scatter([x], [y], s=1500, color=colour, zorder=2)
            text = f"r{at}" if node < 0 else f"{tree.paths[node]:g}"
            axes.text(x, y, text, ha="center", va="center", color="black" if why == DROPPED and node >= 0 else "white")
        axes.text(4.0 * at, 0.45, f"needs {NEEDED[at] - 1:g} tokens beyond its own", ha="center")
    axes.scatter([], [], color="#7570b3", label="its last token, which every step runs")
    for why, colour in colours.items():
        axes.scatter([], [], color=colour, label=why)
    axes.set_xlim(-2.0, 6.0)
    axes.set_ylim(-4.3, 0.8)
    axes.axis("off")
    axes.legend(loc="lower center", ncol=2, frameon=False)
