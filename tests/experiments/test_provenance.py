"""What of a module is in its digest, and what a run says of the code that it measured."""

from __future__ import annotations

import pytest

import experiments
from experiments import provenance

CODE = '''"""What it is."""

def plan(view):
    """Decides."""
    return "# not a comment"  # why
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("  # why", "  # another reason", True),
        ('"""What it is."""', '"""What\n# it\nis now."""', True),
        ('    """Decides."""\n', "", True),
        ("def plan", "\n\n# a word before it\ndef plan", True),
        ("# not a comment", "# nor this", False),
        ("def plan(view)", "def plan(views)", False),
        ("    return", "    view = 1\n    return", False),
    ],
)
def test_comments_and_docstrings_are_in_no_digest(old: str, new: str, same: bool) -> None:
    assert old in CODE
    assert (provenance.digest(CODE) == provenance.digest(CODE.replace(old, new))) == same


def test_code_that_changed_between_two_jobs_counts_as_changed() -> None:
    jobs = [{"code": {"policies/edf.py": "1", "policies/sa.py": "2"}}, {"code": {"policies/edf.py": "3"}}]
    found = provenance.code(jobs)
    assert found == {"policies/edf.py": provenance.SEVERAL, "policies/sa.py": "2"}
    assert provenance.changed({"code": found | {"policies/gone.py": "4"}}) == [
        "policies/edf.py", "policies/sa.py", "policies/gone.py",
    ]  # fmt: skip


def test_what_a_job_loaded_is_said_with_its_value() -> None:
    import rubato.policies.sarathi

    ran = provenance.recorded(provenance.Job("one", max, (1, 2)))
    result = ran.work(*ran.given)
    assert provenance.values([result]) == [2]
    assert provenance.changed({"code": provenance.code([result])}) == []
    assert result["code"]["policies/sarathi.py"] == provenance.digest_of(provenance.ROOT / "policies" / "sarathi.py"), (
        rubato.policies.sarathi.SOURCE
    )


def test_a_figure_keeps_the_packages_that_it_measures() -> None:
    import rubato.latency.affine

    ran = provenance.recorded(provenance.Job("one", max, (1, 2)), also=["latency"])
    found = provenance.code([ran.work(*ran.given)])
    assert found["latency/affine.py"] == provenance.digest_of(provenance.ROOT / "latency" / "affine.py"), (
        rubato.latency.affine
    )
    assert not any(module.startswith("core/") for module in found)
    figures = {name: getattr(experiments.load(name), "CODE", ()) for name in experiments.names()}
    folders = {package for own in figures.values() for package in own}
    assert folders
    assert all((provenance.ROOT / package).is_dir() for package in folders)
