"""The API server of a simulated core: OpenAI's completions, chat and responses, Anthropic's messages, and vLLM's pages.

It knows nothing of HTTP (`simulated_server` has that). The tokens of a prompt are the bytes of its text.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from rubato.core.events import Event, Finished, Tokens
from rubato.core.request import Progress, Request, Sampling, Stage
from rubato.demo.simulated_core import VLLM_VERSION, SimulatedCore
from rubato.wire.messages import Contract

Headers = Sequence[tuple[str, str]]
FIRST_WORD_ID = 1_000_000  # token ids from /tokenize begin here; those of prompts, which are bytes, are below 256
STREAM_EVENTS: Mapping[str, tuple[str, str]] = {  # path -> names of the event with text and of the last event
    "/v1/messages": ("content_block_delta", "message_stop"),
    "/v1/responses": ("response.output_text.delta", "response.completed"),
}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FAILED_STREAM = b'data: {"error":{"message":"","type":"InternalServerError"}}\n\ndata: [DONE]\n\n'  # as vLLM has it
NO_PAGE = {"error": {"message": "no such page.", "type": "invalid_request_error", "param": None, "code": None}}


class SimulatedReply:
    """A response in parts, ended by an empty one.

    Args:
        leave: called when the client leaves before the end.
    """

    def __init__(self, status: int, kind: str, leave: Callable[[], None] = lambda: None) -> None:
        self.status = status
        self.headers: Headers = [("content-type", kind)]
        self.has_ended = False
        self._parts: asyncio.Queue[bytes] = asyncio.Queue()
        self._leave = leave

    def put(self, part: bytes) -> None:
        self._parts.put_nowait(part)

    async def part(self) -> bytes:
        if self.has_ended:
            return b""
        found = await self._parts.get()
        self.has_ended = found == b""
        return found

    def close(self) -> None:
        """End the response: its client has left."""
        if not self.has_ended:
            self.has_ended = True
            self._leave()


class SimulatedApi:
    """Answers requests to `core` under the name `model`."""

    reply_class: type[SimulatedReply] = SimulatedReply
    default_chat_tokens = 128  # output tokens of a chat without max_tokens

    def __init__(self, core: SimulatedCore, model: str) -> None:
        self.core, self.model = core, model
        self._answers = 0

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> SimulatedReply:
        """The response to one HTTP request."""
        if method == "POST" and path in (COMPLETIONS, CHAT, *STREAM_EVENTS):
            try:
                fields = orjson.loads(body.removeprefix(codecs.BOM_UTF8))
                return self._completion(path, headers.get("x-request-id", ""), fields)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                return self._refusal(f"the body cannot be read ({type(error).__name__}: {error})")
        if method == "GET" and path == "/metrics":
            return self.text(200, "text/plain; version=0.0.4", self.metrics_page().encode())
        pages: dict[str, Callable[[], Any]] = {
            "/health": dict, "/version": lambda: {"version": VLLM_VERSION}, "/v1/models": self._models,
            "/tokenize": lambda: self._tokenized(body),
        }  # fmt: skip
        page = pages.get(path)
        return self.page(404, NO_PAGE) if page is None else self.page(200, page())

    # ----------------------------------------------------------------- pages

    def page(self, status: int, content: Any) -> SimulatedReply:
        return self.text(status, "application/json", orjson.dumps(content))

    def text(self, status: int, kind: str, content: bytes) -> SimulatedReply:
        reply = self.reply_class(status, kind)
        reply.put(content)
        reply.put(b"")
        return reply

    def metrics_page(self) -> str:
        """vLLM's gauges that gateways and dashboards read, in Prometheus's text format."""
        view, limits = self.core.host.view(), self.core.limits
        label = f'{{model_name="{self.model}"}}'
        used = 1.0 - view.kv_free / limits.kv_blocks
        gauges = {"num_requests_running": len(view.running), "num_requests_waiting": len(view.waiting)}
        lines = [f"# TYPE vllm:{name} gauge\nvllm:{name}{label} {value}" for name, value in gauges.items()]
        lines += ["# TYPE vllm:kv_cache_usage_perc gauge", f"vllm:kv_cache_usage_perc{label} {used:.6f}"]
        cache = f'{{block_size="{limits.block_size}",num_gpu_blocks="{limits.kv_blocks}"}}'
        lines += ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{cache} 1"]
        return "\n".join(lines) + "\n"

    def _models(self) -> Any:
        one = {"id": self.model, "object": "model", "owned_by": "vllm", "max_model_len": self.core.limits.max_model_len}
        return {"object": "list", "data": [one]}

    def split_words(self, text: str) -> list[str]:
        return text.split()

    def _tokenized(self, body: bytes) -> Any:
        words = self.split_words(orjson.loads(body)["prompt"])
        return {"count": len(words), "tokens": [FIRST_WORD_ID + i for i in range(len(words))]}

    def _refusal(self, message: str) -> SimulatedReply:
        return self.page(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})

    # ----------------------------------------------------------------- completions

    def response_id(self, path: str, request_id: str, fields: Mapping[str, Any]) -> str:
        """The response's id as vLLM makes it, from the header x-request-id or the body of /v1/responses."""
        if path == "/v1/responses":
            return str(fields.get("request_id", f"resp_{self._answers}"))
        return f"{'cmpl' if path == COMPLETIONS else 'chatcmpl'}-{request_id or self._answers}"

    def _completion(self, path: str, request_id: str, fields: dict[str, Any]) -> SimulatedReply:
        self._answers += 1
        if fields.get("temperature", 0) < 0:
            return self._refusal("temperature must be 0 or more")
        answer, n = self.response_id(path, request_id, fields), int(fields.get("n") or 1)
        prompts = [prompt for prompt in _prompts(path, fields) for _ in range(n)]  # one for each choice
        longest, limits = max(map(len, prompts)), self.core.limits
        contract = self.core.take_contract(answer)
        if contract is None and longest >= limits.max_model_len:
            return self._refusal("the prompt is longer than the model's context")
        own = [answer if len(prompts) == 1 else f"{answer}-{i}" for i in range(len(prompts))]
        ids = own if contract is None else contract.ids
        tokens = self._max_tokens(path, fields, limits.max_model_len - longest)
        requests = [self._request(id, prompt, tokens, contract) for id, prompt in zip(ids, prompts, strict=True)]
        streams = bool(fields.get("stream"))
        kind = "text/event-stream; charset=utf-8" if streams else "application/json"
        reply = self.reply_class(200, kind, lambda: self._abort(writer))
        writer = self.writer(reply, answer, path, ids, fields, sum(map(len, prompts)) // n)
        for request in requests:
            self.submit(request, writer, fields)
        return reply

    def writer(
        self, reply: SimulatedReply, answer: str, path: str, ids: Sequence[str], fields: Mapping[str, Any], prompt: int
    ) -> ResponseWriter:
        return ResponseWriter(reply, answer, self.model, path, ids, fields, prompt)

    def submit(self, request: Request, writer: ResponseWriter, fields: Mapping[str, Any]) -> None:
        self.core.submit(request, writer.on_event)

    def _max_tokens(self, path: str, fields: Mapping[str, Any], room: int) -> int:
        names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
        max_tokens = next((int(fields[name]) for name in names if fields.get(name) is not None), None)
        if max_tokens is not None:
            return max_tokens
        return 16 if path == COMPLETIONS else min(self.default_chat_tokens, room)

    def _abort(self, writer: ResponseWriter) -> None:
        for id in writer.ids:
            if self.core.listeners.get(id) == writer.on_event:  # else it has come back: vLLM gives that another id
                self.core.abort(id)

    def _request(self, id: str, prompt: tuple[int, ...], tokens: int, contract: Contract | None) -> Request:
        """A request whose output has exactly `tokens` tokens."""
        now = self.core.clock.now()
        if contract is None:
            output = sum(id >= FIRST_WORD_ID for id in prompt)  # output of another server, from which it goes on
            had = Progress((now,), ((now,) * output,)) if output else None
            stage = Stage(len(prompt) - output, token_ids=prompt[: len(prompt) - output])
            return Request(
                id, (stage,), now, sampling=Sampling(max_tokens=tokens + output, ignore_eos=True), progress=had
            )
        had = contract.progress
        received = 0 if had is None else sum(map(len, had.times))
        if contract.demoted:
            had = replace(had or Progress((contract.arrival,), ((),)), demoted=True)
        length = len(prompt) - received
        return Request(
            id, (Stage(length, contract.slo, token_ids=prompt[:length]),), contract.arrival, tier=contract.tier,
            tenant=contract.tenant, sampling=Sampling(max_tokens=tokens + received, ignore_eos=True),
            on_decline=contract.on_decline, handoff=contract.handoff, progress=had,
        )  # fmt: skip


def _prompts(path: str, fields: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The tokens of each prompt: the bytes of its text, or the ids in the body. Raises as reading a dict does."""
    if path == COMPLETIONS:
        prompt = fields["prompt"]
        several = prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]
        return [tuple(one.encode() if isinstance(one, str) else map(int, one)) for one in several]
    content = fields["input"] if path == "/v1/responses" else fields["messages"]
    if isinstance(content, str):
        return [tuple(content.encode())]
    return [tuple("".join(f"{m['role']}: {_text_of(m['content'])}\n" for m in content).encode())]


def _text_of(content: Any) -> str:
    """The text of a message, or of all its parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class ResponseWriter:
    """Writes one response from the events of its requests.

    Args:
        ids: ids of the requests, one for each choice.
    """

    def __init__(
        self, reply: SimulatedReply, answer: str, model: str, path: str, ids: Sequence[str],
        fields: Mapping[str, Any], prompt: int,
    ) -> None:  # fmt: skip
        options = fields.get("stream_options") or {}
        self.ids = list(ids)
        self._reply, self._answer, self._model, self._prompt = reply, answer, model, prompt
        self._is_chat, self._events = path == CHAT, STREAM_EVENTS.get(path)
        self._streams = bool(fields.get("stream"))
        self._with_usage = bool(options.get("include_usage"))
        self._with_usage_each = bool(options.get("continuous_usage_stats"))
        self._texts: dict[str, list[str]] = {id: [] for id in ids}
        self._ends: dict[str, Finished] = {}
        self._tokens = 0
        self._is_over = False
        self._has_begun = not (self._streams and self._is_chat)

    def on_event(self, event: Event) -> None:
        if self._is_over or not isinstance(event, Tokens | Finished):
            return
        if not self._has_begun:  # with the engine's first word, whatever it is
            self._has_begun = True
            for index in range(len(self.ids)):
                self._put_chunk(index, {"role": "assistant", "content": ""}, None)
        if isinstance(event, Tokens):
            self._tokens += event.tokens
            self._texts[event.id].append(event.text)
            self.write_text(event)
            return
        self._ends[event.id] = event
        if event.outcome != "completed":
            self._fail()
            return
        if self._streams:
            self._put_chunk(self.ids.index(event.id), {} if self._is_chat else {"text": ""}, event.reason)
        if len(self._ends) == len(self.ids):
            self._end()

    def write_text(self, event: Tokens) -> None:
        """Write the chunk of these tokens, in a stream."""
        if self._streams:
            self._put_chunk(self.ids.index(event.id), {"content" if self._is_chat else "text": event.text}, None)

    def _fail(self) -> None:
        self._is_over = True
        if not self._streams:
            self._reply.status = 500
        self._reply.put(FAILED_STREAM if self._streams else b'{"error": {}}')
        self._reply.put(b"")

    def usage(self) -> dict[str, int]:
        """Token counts so far, or of the whole response once all choices have ended."""
        ended = len(self._ends) == len(self.ids)
        output = sum(end.output for end in self._ends.values()) if ended else self._tokens
        return {"prompt_tokens": self._prompt, "completion_tokens": output, "total_tokens": self._prompt + output}

    def last_fields(self) -> Mapping[str, Any]:
        """Further fields of a choice's last chunk."""
        return {}

    def whole_fields(self) -> Mapping[str, Any]:
        """Further fields of an answer that does not stream."""
        return {}

    def _end(self) -> None:
        if self._events is not None and self._streams:
            self._put_event(self._events[1], {"type": self._events[1]})
        elif self._streams:
            if self._with_usage:
                self._put_data({"id": self._answer, "choices": [], "usage": self.usage()})
            self._reply.put(b"data: [DONE]\n\n")
        else:
            choices = []
            for index, id in enumerate(self.ids):
                text = "".join(self._texts[id])
                message = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
                choices.append({"index": index, **message, "finish_reason": self._ends[id].reason})
            head = {"id": self._answer, "object": self._object, "model": self._model}
            self._reply.put(orjson.dumps({**head, "choices": choices, "usage": self.usage(), **self.whole_fields()}))
        self._reply.put(b"")

    @property
    def _object(self) -> str:
        kind = "chat.completion" if self._is_chat else "text_completion"
        return f"{kind}.chunk" if self._streams and self._is_chat else kind

    def _put_event(self, name: str, fields: dict[str, Any]) -> None:
        self._reply.put(f"event: {name}\ndata: ".encode() + orjson.dumps(fields) + b"\n\n")

    def _put_data(self, fields: dict[str, Any]) -> None:
        head = {"object": self._object, "model": self._model}
        self._reply.put(b"data: " + orjson.dumps(fields | head) + b"\n\n")

    def _put_chunk(self, index: int, message: dict[str, Any], reason: str | None) -> None:
        if self._events is not None:
            if reason is None:
                self._put_event(self._events[0], {"delta": message})
            return
        choice = {"index": index, **({"delta": message} if self._is_chat else message), "finish_reason": reason}
        more = dict(self.last_fields()) if reason is not None else {}
        if self._with_usage_each:
            more["usage"] = self.usage()
        self._put_data({"id": self._answer, "choices": [choice], **more})
