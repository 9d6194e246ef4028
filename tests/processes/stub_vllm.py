"""Stands in for an interpreter with vLLM: `stub_vllm.py -m vllm.entrypoints.openai.api_server --port N ...` serves what
the benchmarks ask of one, with no model behind it."""

import asyncio
import json
import sys

from aiohttp import web

FIRST, STEP = 0.02, 0.002  # seconds until the first token, and from one to the next


async def chat(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    said = {"id": "chat-1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    for made in range(1, body["max_tokens"] + 1):
        await asyncio.sleep(FIRST if made == 1 else STEP)
        last = made == body["max_tokens"]
        chunk = said | {
            "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "length" if last else None}],
            "usage": {"prompt_tokens": 8, "completion_tokens": made, "total_tokens": 8 + made},
        }
        await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    await answer.write(b"data: [DONE]\n\n")
    return answer


async def ok(request: web.Request) -> web.Response:
    return web.Response()


async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": "0.0.stub"})


def main(words: list[str]) -> None:
    assert words[:2] == ["-m", "vllm.entrypoints.openai.api_server"], words
    print("asked:", *words)
    app = web.Application()
    app.add_routes([
        web.get("/health", ok), web.get("/metrics", ok), web.post("/reset_prefix_cache", ok),
        web.get("/version", version), web.post("/v1/chat/completions", chat),
    ])  # fmt: skip
    web.run_app(app, host="127.0.0.1", port=int(words[words.index("--port") + 1]), print=None)


if __name__ == "__main__":
    main(sys.argv[1:])
