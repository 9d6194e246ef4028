"""Schemas of bodies: OpenAI's chat and text completions, vLLM's further sampling fields, and our `slo`.

A parameter that would change the output and is not implemented is refused, never ignored; one that changes nothing
(`store`, `metadata`, ...) is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError, ValidationInfo, WithJsonSchema, field_validator

from rubato.core.request import Sampling
from rubato.frontdoor.errors import ApiError, invalid, no_room
from rubato.frontdoor.slo_body import MAX_NAME_CHARACTERS, MAX_UNKNOWN_FIELDS, Body, SLOBody, bad_request, param_path

# Parameters of OpenAI and vLLM that change the answer and are not implemented -> the values that mean "not used".
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "add_special_tokens", "audio", "chat_template", "guided_choice", "guided_grammar", "guided_json",
        "guided_regex", "parallel_tool_calls", "prompt_logprobs", "structured_outputs", "truncate_prompt_tokens",
        "web_search_options",
    ), ()),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "documents", "functions", "logits_processors", "tools"), ([],)),
    **dict.fromkeys(("chat_template_kwargs", "logit_bias", "json_schema"), ({},)),
    **dict.fromkeys((
        "continue_final_message", "echo", "include_stop_str_in_output", "return_token_ids", "use_beam_search",
        "dynamic_temperature",
    ), (False,)),
    **dict.fromkeys(("length_penalty", "guidance_scale", "num_beams", "tfs", "tfs_z", "typical", "typical_p"), (1,)),
    **dict.fromkeys((
        "min_tokens", "priority", "dry_multiplier", "dynatemp_range", "epsilon_cutoff", "eta_cutoff", "mirostat",
        "mirostat_mode", "no_repeat_ngram_size", "penalty_alpha", "smoothing_factor", "top_a", "xtc_probability",
    ), (0,)),
    **dict.fromkeys(("suffix", "grammar", "grammar_string", "negative_prompt"), ("",)),
    "add_generation_prompt": (True,), "function_call": ("none",), "modalities": (["text"],),
    "reasoning_effort": ("none",), "response_format": ({"type": "text"},), "skip_special_tokens": (True,),
    "tool_choice": ("none", "auto"), "verbosity": ("medium",),
}  # fmt: skip
# Fields of other servers that change no answer here, or only that of a sampler in UNSUPPORTED.
IGNORED = frozenset(
    {
        "cache_prompt", "custom_token_bans", "dry_allowed_length", "dry_base", "dry_penalty_last_n",
        "dry_sequence_breakers", "dynatemp_exponent", "dynatemp_high", "dynatemp_low", "id_slot", "include_reasoning",
        "min_keep", "mirostat_eta", "mirostat_tau", "models", "n_keep", "plugins", "provider", "reasoning",
        "reasoning_format", "rep_pen_range", "repeat_last_n", "repetition_penalty_range", "route", "sampler_order",
        "sampler_priority", "samplers", "smoothing_curve", "temperature_last", "thinking", "timings_per_token",
        "transforms", "xtc_threshold",
    }
)  # fmt: skip
MAX_STOPS = 4
MAX_STOP_IDS = 64
MAX_LOGPROBS = 20
INT64 = 2**63
MAX_MESSAGES = 2048  # OpenAI's bound, too
MAX_SHOWN_BODY_BYTES = 65_536  # for larger bodies an error does not repeat the value
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # beyond these a logit overflows float32


Kind = Literal["chat", "text"]  # of a completion
TokenId = Annotated[int, Field(ge=0, lt=INT64)]
NonEmptyText = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Prompts = Annotated[list[NonEmptyText], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
# One prompt or several. `TextCompletion.prompts` reads it: errors of a union would name each of its types.
PROMPT_SCHEMA: dict[str, Any] = {
    **TypeAdapter(NonEmptyText | TokenIds | Prompts).json_schema(),
    "title": "Prompt",
    "description": "A string or a list of token ids, or a list of one of them: then each has `n` choices, all of the "
    "first prompt's first, and how many choices a server gives bounds all of them together.",
}
TYPE_NAMES: Mapping[type, str] = {int: "a token id", str: "a string", list: "a list of token ids"}


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Any

    tool_calls: Any = None
    function_call: Any = None

    @field_validator("tool_calls", "function_call")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value:
            raise ValueError("this server calls no tools: leave it out")
        return value

    @field_validator("content")
    @classmethod
    def _text(cls, value: Any, about: ValidationInfo) -> str:
        if isinstance(value, str):
            return value
        if value is None and about.data.get("role") == "assistant":  # OpenAI: an empty message
            return ""
        if not isinstance(value, list) or not value:
            raise ValueError("give a string, or a list of parts of type text")
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError('this model reads text only: every part must be {"type": "text", "text": "..."}')
        return "".join(part["text"] for part in value)


class Completion(Body):
    """Fields of both endpoints. Defaults are OpenAI's; integers are read as leniently as vLLM reads them."""

    kind: ClassVar[Kind]
    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=INT64)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    n: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    stop: Any = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOP_IDS, fail_fast=True)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    service_tier: str | None = None
    user: str | None = None
    slo: SLOBody | None = None

    @field_validator("max_tokens", "max_completion_tokens", "n", "seed", "top_k", mode="before", check_fields=False)
    @classmethod
    def _whole(cls, value: Any) -> Any:
        """Reads 16.0 and "16" as 16."""
        try:
            number = float(value) if isinstance(value, str) else value
        except ValueError:
            return value
        return int(number) if isinstance(number, float) and number.is_integer() else value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: Any) -> tuple[str, ...]:
        if value is None:
            return ()
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise ValueError("give a string that is not empty, or a list of them")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"{len(stops)} stop strings given: at most {MAX_STOPS} are allowed")
        return tuple(stops)

    @property
    def choices(self) -> int:
        """Returns how many choices each prompt has."""
        return self.n or 1

    @property
    def limit(self) -> tuple[str, int | None]:
        """Returns the field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens

    def _sampling(self, max_tokens: int, logprobs: int | None) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            top_k=max(0, self.top_k or 0),  # vLLM writes "off" as -1, OpenAI has no such field
            min_p=float(self.min_p or 0.0),
            presence_penalty=float(self.presence_penalty or 0.0),
            frequency_penalty=float(self.frequency_penalty or 0.0),
            repetition_penalty=1.0 if self.repetition_penalty is None else float(self.repetition_penalty),
            seed=self.seed,
            stop=self.stop or (),
            stop_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )


class ChatCompletion(Completion):
    kind: ClassVar = "chat"
    count: ClassVar = 1  # prompts

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, about: ValidationInfo) -> int | None:
        if value and not about.data.get("logprobs"):
            raise ValueError("only allowed together with logprobs=true")
        return value

    def sampling(self, max_tokens: int) -> Sampling:
        return self._sampling(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().limit
        return "max_completion_tokens", self.max_completion_tokens

    def where(self, prompt: int) -> str:
        """Returns the field that a prompt comes from."""
        return "messages"

    def dialogue(self) -> list[dict[str, str]]:
        """Returns the messages as a chat template wants them; `developer` is OpenAI's newer name for `system`."""
        return [{"role": "system" if m.role == "developer" else m.role, "content": m.content} for m in self.messages]


class TextCompletion(Completion):
    kind: ClassVar = "text"

    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: int | None = Field(default=16, ge=1)  # OpenAI's default
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None

    @field_validator("best_of")
    @classmethod
    def _all_returned(cls, value: int | None, about: ValidationInfo) -> int | None:
        n = about.data.get("n") or 1
        if value is not None and value != n:
            raise ValueError(f"this server returns every choice it makes: give n ({n}), or leave it out")
        return value

    def sampling(self, max_tokens: int) -> Sampling:
        return self._sampling(max_tokens, self.logprobs)

    @property
    def several(self) -> bool:
        """Returns whether `prompt` is a list of prompts."""
        return isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], str | list)

    @property
    def count(self) -> int:
        """Returns how many prompts there are; they are not checked."""
        return len(self.prompt) if self.several else 1

    def prompts(self, max_model_len: int) -> tuple[str | tuple[int, ...], ...]:
        """Returns the prompts: text, or token ids. Callers check `count` first, since the field may hold more than is
        ever read; this is why it has no validator.

        Args:
            max_model_len: tokens of the model's context.

        Raises:
            ApiError: 400 that names the prompt at fault.
        """
        if self.prompt == []:
            raise invalid("prompt", "the list is empty: give at least one prompt, or one token id.")
        prompts = self.prompt if self.several else [self.prompt]
        for at, one in enumerate(prompts):  # ids are counted before they are looked at one by one
            if isinstance(one, list) and len(one) >= max_model_len:
                raise no_room(max_model_len, str(len(one)), self.where(at))
        if not self.several:
            return (_prompt(self.prompt, ("prompt",)),)
        _check_alike(prompts, ("prompt",))
        return tuple(_prompt(one, ("prompt", at)) for at, one in enumerate(prompts))

    def where(self, prompt: int) -> str:
        """Returns the field that a prompt comes from."""
        return "prompt" if self.count == 1 else param_path(("prompt", prompt))


def _prompt(value: Any, at: tuple[int | str, ...]) -> str | tuple[int, ...]:
    """Checks one prompt, whose path in the body is `at`. Raises ApiError 400."""
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise invalid(param_path(at), "give a string that is not empty, or a list of one token id or more.")
    _check_alike(value, at)
    if type(value[0]) is not int:
        raise invalid(param_path(at), "give a string, or a list of token ids.")
    if min(value) < 0:
        raise invalid(param_path(at), f"token id {min(value)} is negative: give the ids of the model's own vocabulary.")
    if max(value) >= INT64:
        raise invalid(param_path(at), "a token id is 2**63 or more: give the ids of the model's own vocabulary.")
    return tuple(value)


def _check_alike(values: list[Any], at: tuple[int | str, ...]) -> None:
    kind = type(values[0])
    for index, value in enumerate(values):
        if type(value) is not kind and kind in TYPE_NAMES:
            raise invalid(param_path((*at, index)), f"this must be {TYPE_NAMES[kind]}, as the first one is.")


AnyCompletion = ChatCompletion | TextCompletion
B = TypeVar("B", bound=Completion)


def parse(schema: type[B], raw: bytes) -> B:
    """Parses a body. Raises ApiError 400 that names the first field at fault."""
    try:
        body = schema.model_validate_json(raw)
    except ValidationError as error:
        raise bad_request(error, shown=len(raw) <= MAX_SHOWN_BODY_BYTES) from None
    _refuse_unsupported(body)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: only allowed together with stream=true.", param="stream_options")
    return body


def _refuse_unsupported(body: Completion) -> None:
    extra = body.model_extra or {}
    for name, value in extra.items():
        unused = UNSUPPORTED.get(name)
        if unused is not None and not _means_unused(value, unused):
            hint = f"; only {unused[0]!r} is accepted" if unused else ""
            message = f"{name}: not supported by this server{hint}."
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    names = [*type(body).model_fields, *UNSUPPORTED]
    for count, name in enumerate((name for name in extra if name not in UNSUPPORTED and name not in IGNORED), 1):
        if count > MAX_UNKNOWN_FIELDS:
            message = f"The body has more than {MAX_UNKNOWN_FIELDS} fields that this server does not know."
            raise ApiError(400, message, code="unknown_parameter")
        if near := get_close_matches(name[:MAX_NAME_CHARACTERS], names, 1, cutoff=0.85):
            message = f"{name}: unknown parameter; did you mean {near[0]}?"
            raise ApiError(400, message, param=name, code="unknown_parameter")


def _means_unused(value: Any, unused: tuple[Any, ...]) -> bool:
    """Returns whether a value means "not used". JSON false is not the number 0, nor the other way round."""
    return value is None or any(value == u and isinstance(value, bool) == isinstance(u, bool) for u in unused)
