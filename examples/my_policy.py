"""A policy of your own, in one file: shortest prompt first.

    rubato simulate --profile opt-13b-2xa100-40g@vllm-2024 --scenario slos-serve-chatbot --rate 5 --duration 60 \
        --policy examples/my_policy.py
    rubato serve bundled --policy examples/my_policy.py

A scheduler sees one replica as a `View` and says what the next step runs as a `Plan`. Engine, queues and KV blocks
belong to the replica, which checks each plan. docs/policies.md says what a `View` holds.
"""

# mypy: allow-untyped-defs
from dataclasses import dataclass

from rubato import BatchBuilder, admit_in_order, run_in_order

SOURCE = "shortest prompt first"


@dataclass
class Scheduler:
    needs = frozenset({"chunked", "mixed", "preempt"})  # of the engine
    budget: int = 512  # tokens in a batch; a setting: my_policy.py:budget=256

    def observe(self, events):
        """Nothing to learn."""

    def plan(self, view):
        builder = BatchBuilder(view, self.budget)
        run_in_order(builder, view.running)
        admit_in_order(builder, sorted(view.waiting, key=lambda seq: seq.pending))
        return builder.plan()
