"""One sequence in the engine: its token ids, how it samples, and what of its output is final text by now."""

from __future__ import annotations

from collections.abc import Sequence as Items

from rubato.core.plan import Emitted, FinishReason, Logprob
from rubato.core.request import Progress, Request
from rubato.core.stop_strings import StopText
from rubato_torch.drafters import Draft
from rubato_torch.sampling import Choice
from rubato_torch.tokenizer import Detokeniser


class Sequence:
    """Raises ValueError for sampling settings out of range and for a prompt of which there are no token ids.

    eos: the ids that end the text; empty where the request ignores them (its own stop ids end it all the same).
    literals: for each stage the id of the special token that its `ends` is, if it is one (it has no text then).
    """

    def __init__(
        self, request: Request, token_bytes: Items[bytes], eos: frozenset[int], literals: Items[int | None]
    ) -> None:
        for number, stage in enumerate(request.stages):
            if len(stage.token_ids) != stage.prompt:
                raise ValueError(
                    f"request {request.id!r}, stage {number}: the torch engine needs the prompt's token_ids"
                )
        self.request = request
        self.choice = Choice.of(request.sampling)
        self.tokens = list(request.stages[0].token_ids)
        self.output = 0
        self.stage = 0
        self.draft: Draft | None = None  # candidates for what follows `tokens`
        self._ends = eos | frozenset(request.sampling.stop_ids)
        self._literals = literals
        self._detokeniser = Detokeniser(token_bytes)
        self._stop = StopText(request.sampling.stop)
        self._tail = ""  # the end of this stage's text, as much of it as a part of its `ends` can be
        self._penalise_prompts = request.sampling.repetition_penalty != 1.0  # the other penalties look at output only
        if self._penalise_prompts:
            self.choice.saw(self.tokens, output=False)

    def take(self, token: int, logprobs: tuple[Logprob, ...] = ()) -> Emitted:
        """Append a sampled token and say what came of it."""
        self.tokens.append(token)
        self.choice.saw((token,), output=True)
        self.output += 1
        if token in self._ends:
            return Emitted(1, self._stop.flush(), (token,), "stop", logprobs=logprobs)
        new = self._detokeniser.add(token)
        text, stopped = self._stop.add(new)
        if stopped:
            return Emitted(1, text, (token,), "stop", logprobs=logprobs)
        finish: FinishReason | None = None
        if self.output >= self.request.sampling.max_tokens:
            finish = "length"
            text += self._stop.flush()
        done = self._stage_ends(token, new)
        return Emitted(1, text, (token,), finish, done, logprobs)

    def resume(self, progress: Progress) -> None:
        """Go to where the request was on the replica that it comes from, as if all its tokens had come out here; its
        client has what `take` would emit. Raises ValueError for a progress that cannot be this request's."""
        for number, token in enumerate(progress.token_ids, 1):
            self.choice.skip()
            if (finish := self.take(token).finish) is not None:
                raise ValueError(
                    f"request {self.request.id!r} was to go on after {len(progress.token_ids)} tokens, but it ends "
                    f"({finish}) with token {number}: give the progress of a request that has not ended"
                )
        stages, tokens = len(progress.times), sum(map(len, progress.times))
        if (stages, tokens) != (self.stage + 1, self.output):
            raise ValueError(
                f"request {self.request.id!r} is said to have had {tokens} tokens in {stages} stages, but its "
                f"token_ids are {self.output} in {self.stage + 1}: the torch engine needs the ids of all its output"
            )

    def _stage_ends(self, token: int, new: str) -> bool:
        """Whether this stage's literal is complete now; if so go on to the next stage (its prompt, if any, follows)."""
        stages = self.request.stages
        ends = stages[self.stage].ends
        if ends == "eos":
            return False
        seen = self._tail + new
        self._tail = seen[max(0, len(seen) - len(ends) + 1) :]
        if ends not in seen and token != self._literals[self.stage]:
            return False
        if self.stage + 1 < len(stages):
            self.stage += 1
            self.tokens += stages[self.stage].token_ids
            if self._penalise_prompts:
                self.choice.saw(stages[self.stage].token_ids, output=False)
            self._tail = ""
        return True
