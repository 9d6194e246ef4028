"""The files that a repository is found, cited, checked and contributed to by: they parse, and name what is there."""

from __future__ import annotations

import re
import shlex
import tomllib
from typing import Any

import pytest
import yaml

from rubato.config.schema import Config
from tests.docs.pages import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [ROOT / ".github" / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")]
AT_THE_TOP = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT", "CHANGELOG")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def parsed(path: Any) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_targets_that_exist(path: Any) -> None:
    workflow = parsed(path)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = [step["run"] for step in steps(workflow) if "run" in step]
    assert asked
    for line in "\n".join(asked).splitlines():
        words = shlex.split(line)
        assert words[0] == "make", "what CI does must be what a contributor can type: make it a target"
        assert set(words[1:]) <= targets
    assert workflow["env"]["CI"] == "true"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_named_by_commit_with_their_version(path: Any) -> None:
    """A tag can be moved to another commit; Dependabot reads the version from the comment."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if re.search(r"\buses:", line)]
    assert lines
    for line in lines:
        assert re.fullmatch(r"\s*- uses: actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_dependabot_looks_at_all_that_is_pinned() -> None:
    updates = parsed(ROOT / ".github" / "dependabot.yml")["updates"]
    looked_at = {(update["package-ecosystem"], update["directory"]) for update in updates}
    assert looked_at == {("pip", "/requirements"), ("github-actions", "/"), ("docker", "/deploy")}
    assert list((ROOT / "requirements").glob("*.txt"))
    assert list((ROOT / "deploy").glob("*Dockerfile"))


def test_the_workflow_keeps_a_bill_of_materials() -> None:
    job = parsed(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["sbom"]
    assert "make sbom" in [step.get("run") for step in job["steps"]]
    (kept,) = [step["with"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"-o {kept['path']} " in makefile
    assert re.search(
        r"^cyclonedx-bom==", (ROOT / "requirements" / "tools.txt").read_text(encoding="utf-8"), re.MULTILINE
    )


def test_ci_runs_what_must_pass_and_the_first_command_of_the_readme() -> None:
    workflow = parsed(ROOT / ".github" / "workflows" / "ci.yml")
    runs = {step["run"] for step in steps(workflow) if "run" in step}
    required = re.findall(r"^make .*", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert runs >= {*required, "make demo", "make docs"}
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"][0] == oldest


def test_the_citation_is_of_this_version() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}  # those without which it is refused
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_are_forms(path: Any) -> None:
    form = parsed(path)
    assert form.keys() >= {"name", "description", "body"}
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in asked} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert len({part["id"] for part in asked}) == len(asked) > 1
    assert all(part["attributes"]["label"] for part in asked)


def test_commit_hooks_use_what_setup_installs() -> None:
    hooks = [hook for repo in parsed(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    entries = [shlex.split(hook["entry"]) for hook in hooks]
    assert [words[:2] for words in entries] == [
        [".venv/bin/ruff", "check"],
        [".venv/bin/ruff", "format"],
    ]
    assert all(hook["language"] == "system" for hook in hooks)


@pytest.mark.parametrize("path", AT_THE_TOP, ids=lambda path: path.name)
def test_links_at_the_top_lead_somewhere(path: Any) -> None:
    """Those within docs/ are looked at by the build of the site."""
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            assert (ROOT / file).is_file(), link
            text = (ROOT / file).read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
            assert not anchor or anchor in [slug(heading) for heading in headings], link


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_contributing_fits_a_page() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_the_page_on_security_fits_a_page_and_states_the_defaults() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 120
    config = Config()
    assert f"`max_body_bytes`, {config.max_body_bytes >> 20} MiB" in page
    assert f"`max_choices`, {config.max_choices} |" in page
    assert f"`stall_seconds` ({config.stall_seconds:g} s)" in page
    assert "](docs/security.md)" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
