"""Kinds of request from YAML."""

from pathlib import Path

import pytest

from rubato import mix, workload
from rubato.types import SLO

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
    assert mix.read(written(tmp_path, TEXT)) == [
        workload.chat(SLO(1.0, 0.08), share=6.0),
        workload.summary(SLO(e2e=60.0), tier="batch", prompt=(400, 900), output=(30, 80)),
        workload.code(SLO(), tier="free", share=3.0, prompt=(200, 200), output=(60, 60)),
    ]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("app: chat", "app: chatt", "did you mean 'chat'"),
        ("tier: batch", "tier: bach", "'summary' is of tier 'bach', which has no entry: did you mean 'batch'"),
        ("share: 6", "share: 0", "kinds.0.share"),
        ("share: 6", "shares: 6", "kinds.0.shares"),
        ("ttft_ms: 1000", "ttft: 1000", "tiers.chat.ttft"),
        ("ttft_ms: 1000", "ttft_ms: -1", "tiers.chat.ttft_ms"),
        ("[400, 900]", "[900, 400]", r"prompt is \(900, 400\) tokens"),
        ("kinds:", "kind:", "kinds: Field required"),
        ("tiers:", "tiers: [", "not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        mix.read(written(tmp_path, TEXT.replace(old, new, 1)))
    assert "mix.yaml" in str(error.value)
