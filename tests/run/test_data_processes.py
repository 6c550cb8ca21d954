"""`Strategy.data` in several processes: each reads its part, and all have the batches, losses and errors of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import data_program
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


def launched(folder, n):
    """What each of some processes found, of eight devices between them."""
    options = ["-n", str(n), "--devices-per-process", str(8 // n), "--log-dir", str(folder)]
    command = [sys.executable, "-m", "autoshard", "launch", *options, data_program.__file__]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    logs = ((folder / f"rank-{index}.log").read_text() for index in range(n))
    return [json.loads(line.removeprefix("found ")) for log in logs for line in log.splitlines() if line.startswith("found ")]


SHARDS = {  # per split and number of processes, the shards' number and that of each process
    "rows": {2: (2, [0, 1]), 4: (4, [0, 1, 2, 3])},
    "replicated": {2: (1, [0, 0]), 4: (1, [0, 0, 0, 0])},
    "shared by processes": {2: (2, [0, 1]), 4: (2, [0, 0, 1, 1])},
    "in turns": {2: (2, [0, 1]), 4: (4, [0, 1, 2, 3])},
    "columns": {2: (1, [0, 0]), 4: (1, [0, 0, 0, 0])},
    "two ways": {2: (2, [0, 1]), 4: (2, [0, 0, 1, 1])},
}


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_read_their_parts_of_the_same_batches(tmp_path, n):
    """For every split, way to read, and after a restart; losses are those of one process; who reads otherwise is refused in all."""
    found = launched(tmp_path, n)
    assert len(found) == n
    for split, shards in SHARDS.items():
        num_shards, ids = shards[n]
        assert [each[split].pop("state") for each in found] == [state_of_one_process(split)] * n
        assert [each[split].pop("shard") for each in found] == [[num_shards, index, 16 // num_shards] for index in ids]
        wanted = {way: [True] * 3 for way in ("examples", "own rows", "whole batches")} | {"resumed": [True] * 2}
        assert [each[split] for each in found] == [wanted] * n
    for each in found:
        for split, losses in each["losses"].items():
            np.testing.assert_allclose(losses, data_program.losses(split), rtol=1e-5)
    refused(found, n)


def state_of_one_process(split):
    """After a batch of examples: the same for any number of processes, which can all go on from it."""
    with data_program.of(split).data(data_program.Examples()) as batches:
        next(batches)
        return batches.get_state()


def refused(found, n):
    """All processes get an error in place of waiting, or end together."""
    for index, said in enumerate(each["refused"] for each in found):
        assert said["other rows"][0] == 1 and f"process {n - 1} read others than process 0" in said["other rows"][1]
        assert said["fails"] == [2, "OSError: the disk is gone"] if index == 1 else "process 1 failed to" in said["fails"][1]
        assert said["one row less"] == [3, ""]
        assert said["less"][0] == 2 and f"process {n - 1} has fewer than process 0" in said["less"][1]
        assert said["dropped"] == [1, ""]
