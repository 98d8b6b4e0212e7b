"""Fixtures of the kernel machines' tests."""

import pytest

from torchlssvm.functional import cost


@pytest.fixture
def updates_at_any_size(monkeypatch):
    """Small machines factor anew: here they update from 16 samples on, so that small cases show what large ones do."""
    monkeypatch.setattr(cost, "SMALL_KERNEL", 16)
