# SPDX-License-Identifier: Apache-2.0
"""The soak itself: runs add up, and it sees texts that differ and memory that grows."""

import json

import cases
import pytest
import soak
import torch

devices = pytest.mark.parametrize("device", cases.devices())


@devices
def test_runs_add_up(device, tmp_path, capsys):
    state = tmp_path / "soak.json"
    for runs in (1, 2):
        given = ["--minutes", "0.05", "--state", str(state), "--device", device, "--family", "Llama"]
        assert soak.main(given) == 0, capsys.readouterr().err
        found = json.loads(state.read_text())
        assert len(found["slices"]) == runs and all(one["calls"] >= 36 for one in found["slices"])
        assert set(found["digests"]) == {call.name for call in soak.calls_for(device, ["Llama"])}
    said = capsys.readouterr().out
    assert "2 runs" in said and "1 runs" in said


def test_calls_reach_every_family_format_and_way():
    for device, left_out in soak.OTHER_DTYPES.items():
        calls = soak.calls_for(device)
        assert {call.family for call in calls} == set(soak.FAMILIES)
        assert {call.kv_cache for call in calls} == set(soak.rt.KV_FORMATS) - set(left_out)
        assert {call.weights for call in calls} == set(soak.ROUNDED) and {call.way for call in calls} == set(soak.WAYS)


class Faulty(soak.Models):
    """After 20 calls, one that writes something else, or keeps memory."""

    def __init__(self, fault):
        super().__init__("cpu")
        self.fault, self.count, self.kept = fault, 0, []

    def run(self, call):
        self.count += 1
        if self.fault == "leak" and self.count > 20:
            self.kept.append(torch.ones(1 << 22))
        return str(self.count) if self.fault == "text" and self.count == 20 else "the same"


@pytest.mark.parametrize(("fault", "words"), [("text", "wrote 20, before the same"), ("leak", "host_bytes grew")])
def test_faults_are_seen(fault, words):
    calls = soak.calls_for("cpu", ["Llama"])[:6]
    wrong = soak.soak({}, "cpu", 3, calls, lambda now: None, Faulty(fault))
    assert wrong and words in wrong[0], wrong
    assert not soak.soak({}, "cpu", 0, calls, lambda now: None, Faulty(None))
