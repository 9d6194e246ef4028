"""Kinds of request from YAML."""

from pathlib import Path

import pytest

from rubato.config import kinds_file
from rubato.core.request import SLO
from rubato.workloads import request_kinds
from rubato.workloads.lengths import Percentiles, log_normal, log_normal_p99

TEXT = """
tiers:
  chat: {ttft_ms: 1000, tpot_ms: 80}
  batch: {e2e_ms: 60000}
  free: {}
kinds:
  - {app: chat, share: 6}
  - {app: summary, tier: batch, prompt: [400, 900], output: [30, 80]}
  - {app: code, tier: free, share: 3, prompt: 200, output: 60}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    return path


def test_kinds_have_tiers_shares_and_lengths(tmp_path: Path) -> None:
    assert kinds_file.read(written(tmp_path, TEXT)) == [
        request_kinds.chat(SLO(1.0, 0.08), share=6.0),
        request_kinds.summary(SLO(e2e=60.0), tier="batch", prompt=(400, 900), output=(30, 80)),
        request_kinds.code(SLO(), tier="free", share=3.0, prompt=(200, 200), output=(60, 60)),
    ]


def test_lengths_may_be_distributions_and_ttft_a_slowdown(tmp_path: Path) -> None:
    text = """
tiers: {t: {tpot_ms: 50}}
kinds:
  - {app: chat, tier: t, output: {mean: 60, std: 50, p99: 250}, ttft_slowdown: 4}
  - {app: search, tier: t, prompt: {mean: 900, p99: 4000}, output: {percentiles: {90: 120, 50: 40}}}
"""
    one, two = kinds_file.read(written(tmp_path, text))
    assert one == request_kinds.chat(SLO(tpot=0.05), tier="t", output=log_normal(60, 50, 250), ttft_slowdown=4.0)
    assert two.prompt == log_normal_p99(900, 4000)
    assert two.output == Percentiles((0.5, 0.9), (40.0, 120.0))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("app: chat", "app: chatt", "did you mean 'chat'"),
        ("tier: batch", "tier: bach", "'summary' is of tier 'bach', which has no entry: did you mean 'batch'"),
        ("share: 6", "share: 0", "kinds.0.share"),
        ("share: 6", "share: yes", "kinds.0.share.*got True"),
        ("prompt: 200", "prompt: true", "kinds.2.prompt.*got True"),
        ("prompt: 200", "prompt: {mean: true, p99: 90}", "kinds.2.prompt"),
        ("[400, 900]", "[true, 900]", "kinds.1.prompt"),
        ("share: 6", "shares: 6", "kinds.0.shares"),
        ("ttft_ms: 1000", "ttft: 1000", "tiers.chat.ttft"),
        ("ttft_ms: 1000", "ttft_ms: -1", "tiers.chat.ttft_ms"),
        ("ttft_ms: 1000", "ttft_ms: 0.0009", "tiers.chat.ttft_ms: .* greater than or equal to 0.001"),
        ("ttft_ms: 1000", "ttft_ms: 1.7e+308", "tiers.chat.ttft_ms: .* less than or equal to 1000000000"),
        ("[400, 900]", "[900, 400]", r"prompt is \(900, 400\) tokens"),
        ("prompt: 200", "prompt: {mean: 200}", r"'code': prompt should be {mean, std, p99}"),
        ("prompt: 200", "prompt: {mean: 200, p99: 90}", "no log-normal has mean 200"),
        ("prompt: 200", "prompt: {men: 200}", "kinds.2.prompt"),
        ("kinds:", "kind:", "kinds: Field required"),
        ("tiers:", "tiers: [", r"not YAML \(expected ',' or ']', but got '<scalar>' in line 4, column 3\)$"),
        ("tiers:", "tiers: \0", r"not YAML \(special characters are not allowed\)$"),
        ("app: chat,", "app: chess,", "'chess' has no usual lengths: give both of prompt and output$"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        kinds_file.read(written(tmp_path, TEXT.replace(old, new, 1)))
    assert "mix.yaml" in str(error.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mix.yaml"
    path.write_bytes(b"tiers: \xff")
    with pytest.raises(ValueError, match=r"mix.yaml: not YAML \(invalid start byte\)$"):
        kinds_file.read(path)
