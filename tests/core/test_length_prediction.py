"""Length predictors: nothing from nothing, what finished requests of a class say, an oracle with its noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.config.build import lengths_of
from rubato.config.schema import ConfigError, load
from rubato.core.interfaces import LengthPredictor
from rubato.core.length_prediction import (
    MAX_CLASSES,
    MAX_LENGTHS,
    PREDICTORS,
    ConditionalMean,
    Gaussian,
    LengthRange,
    NormalLengths,
    Oracle,
    Quantile,
    RunningMean,
)
from rubato.core.plan import Limits
from rubato.core.request import Request, Sampling, Stage
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency import affine
from rubato.policies import PolicyError, default_lengths
from rubato.simulation import run_spec


def of(app: str, id: str = "a", most: int = 1000, tier: str = "default") -> Request:
    return Request(id, (Stage(1),), 0.0, app=app, tier=tier, sampling=Sampling(max_tokens=most))


def gaussian(seed: int = 0, least: int = 5) -> Gaussian:
    return Gaussian(np.random.default_rng(seed), least)


def test_running_mean() -> None:
    mean = RunningMean(least=2)
    assert mean.remaining(of("chat"), 0) is None
    mean.learn(of("code"), 10)
    assert mean.remaining(of("chat"), 0) == 10  # all apps, until there are enough of its own
    mean.learn(of("chat"), 100)
    mean.learn(of("chat"), 300)
    assert mean.remaining(of("chat"), 0) == 200
    assert mean.remaining(of("chat"), 150) == 50
    assert mean.remaining(of("chat"), 500) == 1
    assert mean.remaining(of("chat", most=50), 0) == 50


@pytest.mark.parametrize(
    ("app", "most", "output", "remaining"),
    [
        ("chat", 1000, 0, 200),
        ("chat", 1000, 100, 150),  # of 100, 200 and 300 those beyond 100
        ("chat", 1000, 299, 1),
        ("chat", 1000, 300, 300),  # none of its own was longer: those of all, 600
        ("chat", 1000, 600, 1),  # nor any at all
        ("chat", 150, 0, 150),
        ("chat", 150, 140, 10),
        ("code", 1000, 0, 242),  # too few of its own: all five
        ("code", 1000, 250, 200),
    ],
)
def test_conditional_mean(app: str, most: int, output: int, remaining: float) -> None:
    mean = ConditionalMean(least=3)
    assert mean.remaining(of(app), 0) is None
    for length in (100, 200, 300):
        mean.learn(of("chat"), length)
    mean.learn(of("code"), 10)
    mean.learn(of("code"), 600)
    assert mean.remaining(of(app, most=most), output) == remaining


@pytest.mark.parametrize(
    ("app", "most", "output", "remaining"),
    [
        ("chat", 1000, 0, 95),  # of 1 to 100
        ("chat", 1000, 80, 19),  # of 81 to 100
        ("chat", 1000, 99, 1),
        ("chat", 1000, 100, 500),  # none of its own was longer: those of all, 600
        ("chat", 1000, 600, 1),
        ("chat", 50, 0, 50),
        ("code", 1000, 0, 96),  # too few of its own: all 101
        ("stated", 1000, 0, 195),
        ("stated", 1000, 180, 19),
        ("stated", 1000, 200, 1),
    ],
)
def test_quantile(app: str, most: int, output: int, remaining: float) -> None:
    bound = Quantile(least=3, classes={"stated": [100, 200]})
    assert bound.remaining(of("chat"), 0) is None
    for length in range(1, 101):
        bound.learn(of("chat"), length)
    bound.learn(of("code"), 600)
    assert bound.remaining(of(app, most=most), output) == remaining


def test_running_mean_goes_by_tier_where_no_app_is_named_and_keeps_a_bounded_number_of_classes() -> None:
    mean = RunningMean(least=1)
    mean.learn(of("", tier="completion"), 10)
    mean.learn(of("", tier="chat"), 300)
    assert [mean.remaining(of("", tier=tier), 0) for tier in ("completion", "chat", "new")] == [10, 300, 155]
    for i in range(MAX_CLASSES):
        mean.learn(of("", tier=f"any text of a client {i}"), 50)
    assert mean.remaining(of("", tier="completion"), 0) == 50


def test_a_class_is_the_tier_where_no_app_is_named_and_old_lengths_are_forgotten() -> None:
    mean = ConditionalMean(least=1)
    mean.learn(of("", tier="gold"), 10)
    mean.learn(of("", tier="free"), 30)
    assert [mean.remaining(of("", tier=tier), 0) for tier in ("gold", "free", "new")] == [10, 30, 20]
    for _ in range(MAX_LENGTHS):
        mean.learn(of("", tier="gold"), 50)
    assert [mean.remaining(of("", tier=tier), 0) for tier in ("gold", "free", "new")] == [50, 30, 50]
    for i in range(MAX_CLASSES):
        mean.learn(of("", tier=f"any text of a client {i}"), 50)
    assert mean.remaining(of("", tier="free"), 0) == 50


def test_gaussian_draws_once_a_request_from_the_fit_of_its_class() -> None:
    predictor = gaussian(least=2)
    assert predictor.remaining(of("chat"), 0) is None
    for length in (400, 600):
        predictor.learn(of("chat"), length)
    predictor.learn(of("code"), 10)
    ids = [f"q{i}" for i in range(2000)]
    drawn = [predictor.remaining(of("chat", id), 0) for id in ids]
    assert drawn == [predictor.remaining(of("chat", id), 0) for id in ids]
    assert drawn == list(reversed([predictor.remaining(of("chat", id), 0) for id in reversed(ids)]))  # whoever is first
    lengths = [n for n in drawn if n is not None]
    assert fmean(lengths) == pytest.approx(500, abs=10)
    assert pstdev(lengths) == pytest.approx(100, abs=7)
    assert predictor.remaining(of("chat", "q7"), 100) == pytest.approx(lengths[7] - 100)
    assert predictor.remaining(of("chat", "q7"), 999) == 1
    assert predictor.remaining(of("chat", "q7", most=50), 0) == 50


def test_gaussian_follows_from_the_generator_it_is_given() -> None:
    def drawn(seed: int) -> float | None:
        predictor = gaussian(seed, least=1)
        for length in (10, 500):
            predictor.learn(of("chat"), length)
        return predictor.remaining(of("chat"), 0)

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


@pytest.mark.parametrize(
    "make", [*PREDICTORS.values(), lambda: ConditionalMean(1), lambda: Quantile(1), lambda: gaussian(1, 1)]
)
@given(
    finished=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 2000)), min_size=1, max_size=30),
    output=st.integers(0, 3000),
    most=st.integers(1, 4000),
)
def test_one_token_or_more_is_left_never_beyond_max_tokens(
    make: Callable[[], LengthPredictor], finished: list[tuple[str, int]], output: int, most: int
) -> None:
    predictor = make()
    for app, length in finished:
        predictor.learn(of(app), length)
    left = predictor.remaining(of("a", most=most), output)
    assert left is not None
    assert isfinite(left)
    assert 1.0 <= left <= max(1.0, most - output)


@given(
    finished=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 200)), min_size=1, max_size=30),
    output=st.integers(0, 250),
    most=st.integers(1, 300),
)
def test_the_longer_a_request_has_run_the_longer_it_is_expected_to_be(
    finished: list[tuple[str, int]], output: int, most: int
) -> None:
    conditional, running = ConditionalMean(least=3), RunningMean(least=3)
    for app, length in finished:
        conditional.learn(of(app), length)
        running.learn(of(app), length)
    asked = of("a", most=most)
    totals = [n + (conditional.remaining(asked, n) or 0.0) for n in (output, output + 1)]
    assert totals[0] <= totals[1] + 1e-9
    assert totals[0] >= min(most, output + (running.remaining(asked, output) or 0.0)) - 1e-9


@pytest.mark.parametrize("kind", ["running_mean", "conditional_mean"])
def test_a_configuration_and_an_experiment_name_them_alike(kind: str) -> None:
    configured = lengths_of(load({"lengths": {"kind": kind, "least": 1}}))
    built = getattr(run_spec, kind)({"a": (100,)})  # which does not tell them the truth
    assert type(configured) is type(built)
    assert built.remaining(of("x"), 0) is None
    for predictor in (configured, built):
        assert predictor is not None
        for _ in range(5):
            predictor.learn(of("x"), 40)
        assert predictor.remaining(of("x"), 0) == 40


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ({"kind": "running_mean", "least": "x"}, "'running_mean': setting least is 'x'; give a whole number"),
        ({"kind": "gaussian", "seed": "x"}, "'gaussian': setting seed is 'x'; give a whole number, like 0"),
        (
            {"kind": "conditional_mean", "least": 0},
            "length predictor 'conditional_mean': least is 0: give a whole number",
        ),
        ({"kind": "gaussian", "seed": -1}, "'gaussian': seed is -1: give a whole number, 0 or more"),
        ({"kind": "gaussian", "rng": 1}, "length predictor 'gaussian' has no setting 'rng'"),
        ("gausian", "unknown length predictor 'gausian': did you mean 'gaussian'"),
        ("oracle", "serve with running_mean or conditional_mean or quantile or gaussian"),
    ],
)
def test_what_cannot_be_configured(lengths: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        lengths_of(load({"lengths": lengths}))


@pytest.mark.parametrize(
    ("kind", "outputs", "chat", "code"),
    [
        ("running_mean", (0, 100, 260), (250, 150, 1), (200, 100, 1)),
        ("conditional_mean", (0, 250, 260), (250, 0.7979 * 50, None), (200, 25, 20)),
    ],
)
def test_a_user_states_lengths_of_classes(
    kind: str, outputs: tuple[int, ...], chat: tuple[float | None, ...], code: tuple[float, ...]
) -> None:
    """A normal and a range; of other classes it learns."""
    classes = {"chat": {"mean": 250, "std": 50}, "code": [100, 300]}
    predictor = lengths_of(load({"lengths": {"kind": kind, "least": 1, "classes": classes}}))
    assert predictor is not None
    assert predictor.remaining(of("other"), 0) is None
    for app in ("chat", "code", "other"):
        predictor.learn(of(app), 40)
    assert predictor.remaining(of("other"), 0) == 40
    assert predictor.remaining(of("", tier="chat"), 0) == pytest.approx(250, abs=0.01)
    for app, wanted in (("chat", chat), ("code", code)):
        for output, left in zip(outputs, wanted, strict=True):
            found = predictor.remaining(of(app), output)
            assert left is None or found == pytest.approx(left, rel=1e-3)


def test_a_draw_is_from_what_is_stated() -> None:
    classes = {"chat": {"mean": 250, "std": 50}, "code": [100, 300]}
    predictor = lengths_of(load({"lengths": {"kind": "gaussian", "classes": classes}}))
    assert predictor is not None
    normal, uniform = ([predictor.remaining(of(app, f"q{i}"), 0) or 0.0 for i in range(2000)] for app in classes)
    assert (fmean(normal), pstdev(normal)) == pytest.approx((250, 50), rel=0.05)
    assert (fmean(uniform), min(uniform), max(uniform)) == pytest.approx((200, 100, 300), rel=0.02)


@given(mean=st.floats(1, 2000), std=st.floats(0, 500), output=st.integers(0, 5000))
def test_what_is_beyond_a_stated_length_is_longer(mean: float, std: float, output: int) -> None:
    for stated in (NormalLengths(mean, std), LengthRange(mean, mean + std)):
        beyond = stated.mean_beyond(output)
        assert beyond is None or beyond >= max(output, stated.mean) - 1e-6 * mean
        below = stated.share_below(output)
        assert 0.0 <= below <= 1.0
        if 0.01 < below < 0.99:
            assert stated.at(below) == pytest.approx(output, abs=1e-6 * max(mean, std))


@pytest.mark.parametrize(
    ("classes", "says"),
    [
        ({"chat": 250}, r"classes.chat is 250: give \{mean: TOKENS, std: TOKENS\}, or a range"),
        ({"chat": {"mean": 250}}, "classes.chat is {'mean': 250}: give"),
        ({"chat": {"mean": 250, "std": 5, "max": 9}}, "classes.chat is .*: give"),
        ({"chat": {"mean": 0, "std": 5}}, "classes.chat is .*: give a mean of 1 token or more"),
        ({"chat": {"mean": 10, "std": -5}}, "classes.chat is .* a std of 0 or more"),
        ({"chat": {"mean": "ten", "std": 5}}, "classes.chat is .*: give a mean"),
        ({"chat": {"mean": float("inf"), "std": 5}}, "give finite numbers"),
        ({"code": [300, 100]}, r"classes.code is \[300, 100\]: give a range of tokens as \[least, most\]"),
        ({"code": [True, 100]}, "classes.code is "),
        ({"code": [1, 2, 3]}, "classes.code is "),
        ({1: [1, 2]}, "classes: 1 is no name"),
        ([1, 2], "classes is .*: give a class's name"),
    ],
)
@pytest.mark.parametrize("kind", PREDICTORS)
def test_what_cannot_be_stated(kind: str, classes: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        lengths_of(load({"lengths": {"kind": kind, "classes": classes}}))


def test_oracle() -> None:
    truth = {"a": 100, "b": 100}
    assert Oracle(truth).remaining(of("x"), 30) == 70
    noisy = Oracle(truth, noise=0.1, seed=1)
    drawn = [noisy.remaining(of("x", id), 0) for id in "ab"]
    assert drawn == [noisy.remaining(of("x", id), 0) for id in "ab"]
    assert drawn[0] != drawn[1]
    assert all(90 <= d <= 110 for d in drawn if d is not None)
    with pytest.raises(KeyError):
        Oracle(truth).remaining(of("x", "unknown"), 0)
    with pytest.raises(ValueError, match="noise"):
        Oracle(truth, noise=1.0)


def test_a_router_may_name_the_predictor_that_is_used_where_none_is_configured(tmp_path: Path) -> None:
    truth = {"a": (100,)}
    for policy, router, usual, served in (
        ("sa", "auto", RunningMean, RunningMean),
        ("vllm", "sa", RunningMean, RunningMean),
        ("polyserve", "auto", ConditionalMean, ConditionalMean),
        ("edf", "auto", type(None), RunningMean),  # a server's clients may state an e2e; a simulation keeps none
    ):
        machine = run_spec.Hardware("one", affine.Model(), Limits(1, 1, 1, 1, 1))
        spec = run_spec.RunSpec(machine, PolicyChoice(policy, router=router))
        assert type(spec.predictor(truth)) is usual
        assert type(lengths_of(load({"policy": policy, "router": router}))) is served
        assert isinstance(lengths_of(load({"policy": policy, "router": router, "lengths": "gaussian"})), Gaussian)
        assert isinstance(replace(spec, lengths=run_spec.oracle_lengths).predictor(truth), Oracle)
    file = tmp_path / "mine.py"
    file.write_text("class Router:\n    default_lengths = 'guess'\n")
    with pytest.raises(PolicyError, match="default_lengths is 'guess': give running_mean or"):
        default_lengths("edf", str(file))


TIERS = {"chat": {"ttft_ms": 500}, "completion": {"e2e_ms": 800}}


@pytest.mark.parametrize(
    ("tiers", "tenants", "given", "has_one"),
    [
        ((), None, {}, True),  # headers and bodies are open to all
        ((), None, {"lengths": None}, False),  # none is wanted
        (("chat",), {"tiers": ["chat"]}, {}, False),  # what a tenant states is loosened to what its tiers promise
        (("chat",), {}, {}, True),  # but for one that may use all
        (("chat", "completion"), {"tiers": ["chat", "completion"]}, {}, True),
        (("chat", "completion"), {"tiers": ["chat", "completion"]}, {"lengths": None}, False),
    ],
)
def test_a_server_has_a_predictor_wherever_an_e2e_may_be_stated(
    tiers: tuple[str, ...], tenants: dict[str, object] | None, given: dict[str, object], has_one: bool
) -> None:
    named = {} if tenants is None else {"tenants": {"a": {"keys": ["k"], **tenants}}}
    config = load({"policy": "edf", "tiers": {name: TIERS[name] for name in tiers}, **named, **given})
    assert isinstance(lengths_of(config), RunningMean) is has_one
    assert isinstance(lengths_of(load({**given, "policy": "sa"})), RunningMean)  # its router's own, either way
