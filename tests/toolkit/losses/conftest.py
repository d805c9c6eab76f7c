"""Lets tests of the loss run with each backend of the row kernels."""

from collections.abc import Iterator

import loss_cases
import pytest


@pytest.fixture(scope="module", params=["torch", "native"])
def each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make `options_for` choose a backend, for a whole module of tests."""
    loss_cases.default_backend = request.param
    yield
    loss_cases.default_backend = "auto"
