"""OpenAI's own client, with an SLO: streams an answer, then prints whether it was in time.

    rubato serve bundled &
    python examples/openai_client.py http://127.0.0.1:8000 --ttft-ms 500 --tpot-ms 80
    python examples/openai_client.py http://127.0.0.1:8000 --tier flex --question "Write a poem about rain."

It runs against `rubato serve`, `rubato gateway` and vLLM with the plug-in alike. Needs `pip install openai`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from openai import APIConnectionError, APIStatusError, OpenAI, RateLimitError


def ask(client: OpenAI, question: str, slo: dict[str, float], tier: str | None, max_tokens: int) -> dict[str, Any]:
    """Print the answer as it comes. Returns the verdict, which the last chunk carries.

    Args:
        slo: `ttft_ms`, `tpot_ms`, `e2e_ms`, as far as they are promised; each comes before the tier's.
        tier: one of the server's tiers; None: its default.
    """
    own: Any = {"service_tier": tier} if tier else {}  # any name of the server's, besides OpenAI's
    verdict: dict[str, Any] = {}
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        stream=True,
        extra_body={"slo": slo} if slo else None,
        **own,
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        verdict = (chunk.model_extra or {}).get("rubato", verdict)
    print()
    return verdict


def _message(error: APIStatusError) -> str:
    """What the server says is wrong, and what would be right."""
    return error.body["message"] if isinstance(error.body, dict) and "message" in error.body else error.message


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="such as http://127.0.0.1:8000")
    parser.add_argument("--question", default="What is the capital of Japan?")
    parser.add_argument("--ttft-ms", type=float, help="time to the first token")
    parser.add_argument("--tpot-ms", type=float, help="time for each token after it")
    parser.add_argument("--e2e-ms", type=float, help="time to the last token")
    parser.add_argument("--tier", help="a tier of the server")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--key", default="none", help="where the server has tenants")
    args = parser.parse_args(arguments)
    slo = {name: value for name in ("ttft_ms", "tpot_ms", "e2e_ms") if (value := getattr(args, name)) is not None}
    with OpenAI(base_url=f"{args.url.rstrip('/')}/v1", api_key=args.key) as client:
        try:
            verdict = ask(client, args.question, slo, args.tier, args.max_tokens)
        except RateLimitError as refusal:  # by `on_decline: refuse`, or a limit of the tenant
            print(f"refused: {refusal.message}")
            return
        except APIConnectionError as error:
            raise SystemExit(f"{args.url} does not answer ({error.__cause__}): start it, or give its URL") from None
        except APIStatusError as error:  # a tier that the server does not have, a wrong key
            raise SystemExit(f"{args.url} answers HTTP {error.status_code}: {_message(error)}") from None
    in_time = {True: "in time", False: f"late ({verdict.get('cause')})", None: "not judged"}[verdict.get("met")]
    print(f"{in_time}: tier {verdict.get('tier')}, served as {verdict.get('served')}")
    for name, target in verdict.get("targets", {}).items():
        if isinstance(target, float):
            print(f"  {name}: {verdict.get(name)} of {target}")


if __name__ == "__main__":
    main()
