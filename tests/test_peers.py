"""Benchmark against torch.distributed.pipelining: both sides compute the same gradients."""

import sys
from pathlib import Path

import numpy as np
import pytest

import terapipe as tp
from terapipe.profiling import plan_probe

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import peers


@pytest.mark.timeout(240)
def test_every_family_has_torchs_gradients_within_1e_10_in_float64(tmp_path):
    model = tp.ModelConfig(4, 32, 4, vocab_size=31, max_seq_tokens=12)
    slicing = tp.uniform_slicing(12, 1, n_microbatches=4, n_sequences=2)
    with peers.PeerRanks(2, tmp_path) as ranks:
        for family, chunks in peers.CHUNKS_PER_RANK.items():
            spec = tp.RunSpec(model, slicing, family, n_ranks=2, chunks_per_rank=chunks, dtype="float64")
            probe = plan_probe(spec, [(12, 0, 2)], tmp_path)
            raced = peers.race(ranks, [("theirs", spec), ("ours", spec)], 2, probe, tmp_path / family)
            assert raced.errors[0] == 0
            assert raced.errors[1] <= 1e-10, family
            assert raced.step_ms.shape == raced.cpu_ms.shape == raced.busy_ms.shape == (2, 2)
            assert np.all(raced.step_ms > 0)
    assert [process.exitcode for process in ranks.processes] == [0, 0]
