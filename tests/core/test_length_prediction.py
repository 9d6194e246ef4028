"""Length predictors: nothing from nothing, the app's own mean, an oracle with its noise."""

import pytest

from rubato.core.length_prediction import Oracle, RunningMean
from rubato.core.types import Request, Sampling, Stage


def of(app: str, id: str = "a", most: int = 1000) -> Request:
    return Request(id, (Stage(1),), 0.0, app=app, sampling=Sampling(max_tokens=most))


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
