"""Two processes for the tests of a target that is split over ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two processes, for all tests."""
    pool = RankPool(2)
    yield pool
    pool.close()
