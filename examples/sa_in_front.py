"""SA's priority mapping in front of any server with OpenAI's API, which stays as it is.

    rubato serve --policy vllm --set engine.max_num_seqs=1 --set prefix_cache=false &
    python examples/sa_in_front.py http://127.0.0.1:8000 --count 10 --max-batch 1

or, for the first line, `vllm serve MODEL --max-num-seqs 1 --no-enable-prefix-caching`.

Half the requests are a chat, with SLOs on TTFT and TPOT, half code, with one on the whole response. Step times are
measured with a few requests first; SLOs are the paper's multiples of them. The same requests are then sent twice, all
at once in order of arrival, and in the batches that `rubato.policies.sa.order` says, each when the one before has
ended. G = requests in SLO / sum of end-to-end latencies.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from rubato import SLO
from rubato.extend import BilinearModel
from rubato.policies.sa import MappedRequest, order

WORDS = (
    "the", "river", "carries", "small", "boats", "past", "quiet", "gardens", "while", "bells", "ring", "over",
    "slate", "roofs", "and", "gulls", "circle",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """Seconds from when the request was given to this program; tokens as the server counted them."""

    ttft: float
    e2e: float
    tokens: int

    def met(self, slo: SLO) -> bool:
        tpot = (self.e2e - self.ttft) / max(1, self.tokens - 1)
        return all(
            limit is None or took <= limit
            for took, limit in ((self.ttft, slo.ttft), (tpot, slo.tpot), (self.e2e, slo.e2e))
        )


@dataclass(frozen=True)
class Client:
    session: aiohttp.ClientSession
    url: str
    model: str

    async def ask(self, prompt: str, tokens: int, given: float) -> Answer:
        """One request, read to its end."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        first = 0.0
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    first = first or time.perf_counter()
        return Answer(first - given, time.perf_counter() - given, tokens)

    async def together(self, jobs: Sequence[MappedRequest], prompts: dict[str, str], given: float) -> dict[str, Answer]:
        answers = await asyncio.gather(*(self.ask(prompts[job.id], job.output, given) for job in jobs))
        return {job.id: answer for job, answer in zip(jobs, answers, strict=True)}


async def measured(client: Client, max_batch: int) -> BilinearModel:
    """The paper's latency model from a short and a long prompt, and from one and `max_batch` decodes together."""

    async def probe(words: int, jobs: int) -> tuple[float, float]:
        now = time.perf_counter()
        answers = await asyncio.gather(*(client.ask(text(words, 900 + i), 16, now) for i in range(jobs)))
        return (
            float(np.median([a.ttft for a in answers])),
            float(np.median([(a.e2e - a.ttft) / (a.tokens - 1) for a in answers])),
        )

    await probe(20, 1)  # the first request of a server is slow
    (short, step), (long, _) = await probe(20, 1), await probe(400, 1)
    together = (await probe(20, max_batch))[1] if max_batch > 1 else step
    per_job = max(0.0, together - step) / max(1, max_batch - 1)
    per_token = max(0.0, long - short) / 380
    fixed = max(step, short - 20 * per_token)
    return BilinearModel((per_token, per_job, 0.0, fixed), (0.0, per_job, 0.0, step - per_job))


def text(words: int, seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


async def run(url: str, count: int, max_batch: int, seed: int) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as session:
        async with session.get(f"{url}/v1/models") as response:
            response.raise_for_status()
            model_name = (await response.json())["data"][0]["id"]
        client = Client(session, url, model_name)
        model = await measured(client, max_batch)
        rng = np.random.default_rng(seed)
        alone = model.prefill(1, 60) + model.decode(1, 60, 48)  # a mean code request
        slos = [SLO(ttft=3.3 * alone, tpot=3.1 * model.step(1, 60)), SLO(e2e=10 * alone)]
        jobs = [
            MappedRequest(f"q{i}", int(rng.integers(20, 200)), int(rng.integers(16, 96)), slos[i % 2])
            for i in range(count)
        ]
        prompts = {job.id: text(job.prompt, i) for i, job in enumerate(jobs)}
        order(jobs, model, max_batch)  # compiles the search, which is to be in nobody's time
        for name in ("order of arrival", "sa"):
            began = time.perf_counter()
            batches = [jobs] if name != "sa" else order(jobs, model, max_batch, seed=seed)
            answers: dict[str, Answer] = {}
            for batch in batches:
                answers |= await client.together(batch, prompts, began)
            met, latency = sum(answers[job.id].met(job.slo) for job in jobs), sum(a.e2e for a in answers.values())
            print(f"{name:18} {met} of {count} in SLO, mean latency {latency / count:.2f} s, G {met / latency:.4f}/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="such as http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--max-batch", type=int, default=1, help="sequences that the server runs at once")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    asyncio.run(run(args.url.rstrip("/"), args.count, args.max_batch, args.seed))


if __name__ == "__main__":
    main()
