"""One process and two end with the same samples, digest and certificates, whenever a correction arrives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.ddp_waiting_worker import CASES, OTHER, X, Y
from tests.support.lightning_ranks import results
from tests.support.lightning_tools import K, truth

WORLDS = (1, 2)
REMOVED = {"r0": 1, "r7": 1, "r31": 1, "r66": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any) -> dict[int, list[dict[str, Any]]]:
    folders = {world: tmp_path_factory.mktemp(f"world{world}") for world in WORLDS}
    return results("tests.support.ddp_waiting_worker", folders)


def expected(stored: bool) -> tuple[str, list[str]]:
    x, y = X.clone(), Y.clone()
    y[40], x[41] = (Y[40] + 1) % K, OTHER[0]
    gone = {0, 7, 31, 66, 13, 58}
    if stored:
        gone |= {i for i in range(67) if i % 5 == 3}
        y[torch.arange(67) % 5 == 4] = 1
    keep = [i for i in range(67) if i not in gone]
    return truth(x[keep], y[keep]).digest(), sorted(map(str, keep))


@pytest.mark.parametrize(("moment", "shuffle", "stored"), CASES)
def test_one_process_and_two_end_alike(runs: Any, moment: str, shuffle: bool, stored: bool) -> None:
    name = f"{moment} {shuffle} {stored}"
    digest, ids = expected(stored)
    for found in itertools.chain.from_iterable(runs.values()):
        assert (found[name]["digest"], found[name]["n"]) == (digest, len(ids))
        assert (found[name]["unanswered"], found[name]["refused"]) == (1, 0)
        assert found[name]["applied"] == (9 if stored else 7)
    if stored:
        certified = [runs[world][0][name]["certified"] for world in WORLDS]
        assert [runs[world][0][name]["ids"] for world in WORLDS] == [ids, ids]
        for found in certified:
            assert found.pop("whose") + found.pop("pair", 0) == 13  # 13 and 58 are named by both events
            assert found == REMOVED
